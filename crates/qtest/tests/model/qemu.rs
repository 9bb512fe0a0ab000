//! Against QEMU's own model.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use onehop_qtest::bed::{Qemu, QemuOptions};
use onehop_qtest::{Error, QemuDrive};

use crate::driver::{enable, identify, io_queue};

fn start(options: &QemuOptions) -> Option<Qemu> {
    Qemu::start_or_skip(options).unwrap()
}

#[test]
fn registers_identify_and_reset() {
    let Some(qemu) = start(&QemuOptions { serial: "ONEHOP42".into(), ..QemuOptions::default() }) else {
        return;
    };
    let port = qemu.port().unwrap();
    assert!(port.simulated && port.name.starts_with("qtest:") && port.mapper.name() == port.name);
    assert_eq!(port.regs.read32(8), 0x1_0400, "version 1.4");
    let cap = port.regs.read64(0);
    assert_eq!(cap & 0xffff, 2047, "MQES");
    assert!(port.regs.size() >= 0x2000);
    assert_eq!(port.regs.read32(port.regs.size()), u32::MAX);
    assert_eq!(port.regs.read32(u32::MAX), u32::MAX);

    let mut admin = enable(&port);
    assert_eq!(&identify(&port, &mut admin, 0, 1)[4..12], b"ONEHOP42");

    let flr = port.reset.clone().expect("QEMU's model has function level reset");
    for _ in 0..3 {
        flr.function_reset().unwrap();
        assert_eq!(port.regs.read32(0x14), 0, "CC after reset");
        assert_eq!(port.regs.read32(0x1c), 0, "CSTS after reset");
        assert_eq!(port.regs.read64(0), cap);
        let mut admin = enable(&port);
        assert_eq!(&identify(&port, &mut admin, 0, 1)[4..12], b"ONEHOP42");
    }
}

#[test]
fn data_reach_the_image_and_come_back() {
    let Some(qemu) =
        start(&QemuOptions { lba: 4096, ms: 8, extended: true, namespaces: 2, ..QemuOptions::default() })
    else {
        return;
    };
    let port = qemu.port().unwrap();
    let mut admin = enable(&port);
    let namespace = identify(&port, &mut admin, 2, 0);
    let format = &namespace[128 + 4 * usize::from(namespace[26] & 0xf)..];
    assert_eq!((format[0], format[1], format[2]), (8, 0, 12), "8 bytes of metadata on blocks of 4096");
    assert_eq!(namespace[26] >> 4, 1, "extended");

    let mut queue = io_queue(&port, &mut admin);
    let (there, back) = (port.mapper.alloc(8192).unwrap(), port.mapper.alloc(8192).unwrap());
    let (from, to) = (port.mapper.map(&there).unwrap(), port.mapper.map(&back).unwrap());
    for lba in 0..40_u32 {
        let block: Vec<u8> = (0..4104_u32).map(|i| (i * 7 + i / 256 + lba) as u8).collect();
        there.write(0, &block).unwrap();
        assert_eq!(queue.run(&port, 0x01, 2, from.contiguous().unwrap().0, [lba, 0, 0]), 0);
        assert_eq!(queue.run(&port, 0x02, 2, to.contiguous().unwrap().0, [lba, 0, 0]), 0);
        assert_eq!(back.to_vec(0, 4104).unwrap(), block);
        let mut image = vec![0; 4096];
        let file = std::fs::File::open(qemu.image(2).unwrap()).unwrap();
        file.read_exact_at(&mut image, u64::from(lba) * 4096).unwrap();
        assert_eq!(image, block[..4096]);
    }
    assert!(qemu.image(0).is_none() && qemu.image(3).is_none());
}

#[test]
fn the_controller_memory_buffer_answers() {
    let extra = vec!["legacy-cmb=on".to_owned()];
    let Some(qemu) = start(&QemuOptions { cmb_mb: 4, extra, ..QemuOptions::default() }) else { return };
    let model = qemu.model().unwrap();
    let cmb = model.cmb().expect("BAR2");
    assert_eq!(cmb.size(), 4 << 20);
    for offset in [0, 4096, (4 << 20) - 4] {
        cmb.write32(offset, 0x1234_5678 ^ offset);
    }
    for offset in [0, 4096, (4 << 20) - 4] {
        assert_eq!(cmb.read32(offset), 0x1234_5678 ^ offset);
    }
    assert_eq!(cmb.read32(4 << 20), u32::MAX);
    assert_eq!(model.port().regs.read32(0x38), 0x62, "CMBLOC names BAR2");
}

#[test]
fn a_dead_qemu_reads_as_all_ones_at_once_and_the_reason_is_kept() {
    let Some(mut qemu) = start(&QemuOptions::default()) else { return };
    let model = qemu.model().unwrap();
    let port = model.port();
    assert_eq!(model.why_gone(), None);
    qemu.kill();
    let begin = Instant::now();
    for _ in 0..100 {
        port.regs.write32(0x1000, 1);
    }
    assert_eq!(port.regs.read32(0x1c), u32::MAX);
    assert_eq!(port.regs.read64(0), u64::MAX);
    assert!(begin.elapsed() < Duration::from_secs(1));
    assert!(model.why_gone().unwrap().contains("ended"), "{:?}", model.why_gone());
    let reset = port.reset.unwrap().function_reset().unwrap_err().to_string();
    assert!(reset.contains("ended"), "{reset}");
    let again = qemu.port().err().unwrap().to_string();
    assert!(again.contains("bed/qtest.sh start"), "{again}");
}

#[test]
fn a_port_can_be_opened_again_and_finds_the_controller_stopped() {
    let Some(qemu) = start(&QemuOptions::default()) else { return };
    for _ in 0..5 {
        let port = qemu.port().unwrap();
        assert_eq!(port.regs.read32(0x14) & 1, 0);
        assert_eq!(port.regs.read32(0x1c) & 1, 0);
        let mut admin = enable(&port);
        identify(&port, &mut admin, 0, 1);
    }
}

#[test]
fn a_second_user_is_refused() {
    let Some(qemu) = start(&QemuOptions::default()) else { return };
    let port = qemu.port().unwrap();
    let second = QemuDrive::open_within(&qemu.spec(), Duration::from_millis(100)).err().unwrap().to_string();
    assert!(second.contains("one qtest client at a time"), "{second}");
    assert_eq!(port.regs.read32(8), 0x1_0400, "the first one is not disturbed");
}

#[test]
fn one_of_several_controllers_is_chosen_by_its_address() {
    let args = ["-device", "nvme,serial=OTHER,addr=06.0"].map(str::to_owned).to_vec();
    let Some(qemu) = start(&QemuOptions { extra: vec!["addr=05.0".into()], args, ..QemuOptions::default() })
    else {
        return;
    };
    let several = qemu.port().err().unwrap().to_string();
    assert!(several.contains("05.0, 06.0"), "{several}");
    for (bdf, serial) in [("05.0", "QTEST0001"), ("06.0", "OTHER    "), ("05.0", "QTEST0001")] {
        let port = onehop_qtest::open(&format!("{},bdf={bdf}", qemu.spec())).unwrap();
        let mut admin = enable(&port);
        assert_eq!(&identify(&port, &mut admin, 0, 1)[4..13], serial.as_bytes());
    }
    let wrong = onehop_qtest::open(&format!("{},bdf=1f.0", qemu.spec())).err().unwrap().to_string();
    assert!(wrong.contains("05.0, 06.0"), "{wrong}");
}

#[test]
fn a_file_that_is_not_the_memory_is_noticed_and_left_alone() {
    let Some(qemu) = start(&QemuOptions::default()) else { return };
    let Some(other) = start(&QemuOptions::default()) else { return };
    let spec = qemu.spec();
    let (socket, memory) = spec.split_once(',').unwrap();
    let other = other.spec().split_once(',').unwrap().1.to_owned();
    let disk = qemu.image(1).unwrap().display().to_string();
    for wrong in [&other, &disk] {
        let error = onehop_qtest::open(&format!("{socket},{wrong}")).err().unwrap();
        assert!(matches!(error, Error::Memory { .. }), "{error}");
        assert!(error.to_string().contains("not the memory of QEMU"), "{error}");
    }
    assert!(std::fs::read(disk).unwrap().iter().all(|byte| *byte == 0), "nothing was written to it");
    assert!(qemu.port().is_ok());
    std::fs::File::options().write(true).open(memory).unwrap().set_len(128 << 20).unwrap();
    let error = qemu.port().err().unwrap().to_string();
    assert!(error.contains("not all of it"), "{error}");
}

#[test]
fn refused_options_are_reported_with_qemus_message() {
    let Some(_qemu) = start(&QemuOptions::default()) else { return };
    let error = Qemu::start(&QemuOptions { lba: 513, ..QemuOptions::default() }).err().unwrap().to_string();
    assert!(error.contains("logical_block_size"), "{error}");
    let absent = QemuOptions { program: "/nowhere/qemu".into(), ..QemuOptions::default() };
    assert!(Qemu::start(&absent).unwrap().is_none());
}

#[test]
fn threads_share_the_socket() {
    let Some(qemu) = start(&QemuOptions { cmb_mb: 1, ..QemuOptions::default() }) else { return };
    let model = qemu.model().unwrap();
    let (port, cmb) = (model.port(), model.cmb().unwrap());
    std::thread::scope(|scope| {
        for id in 0..4_u32 {
            let (port, cmb) = (&port, &cmb);
            scope.spawn(move || {
                for i in 0..200 {
                    cmb.write32(id * 4096, i);
                    assert_eq!(port.regs.read32(8), 0x1_0400);
                    assert_eq!(cmb.read32(id * 4096), i);
                }
            });
        }
    });
}

#[test]
fn nothing_is_left_behind() {
    let Some(qemu) = start(&QemuOptions::default()) else { return };
    let spec = qemu.spec();
    let (socket, memory) = spec.split_once(',').unwrap();
    assert!(std::path::Path::new(memory).exists());
    drop(qemu);
    assert!(!std::path::Path::new(memory).exists() && !std::path::Path::new(socket).exists());
    assert!(!std::path::Path::new(socket).parent().unwrap().exists());
}
