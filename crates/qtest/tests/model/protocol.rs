//! The line protocol against the fake server.

use std::time::{Duration, Instant};

use onehop_qtest::QemuDrive;

use crate::fake::{Fake, Trouble};

const WAIT: Duration = Duration::from_secs(1);

#[test]
fn a_controller_is_found_placed_and_read() {
    let fake = Fake::start("plain");
    let model = QemuDrive::open_within(&fake.spec(), WAIT).unwrap();
    let port = model.port();
    assert_eq!(port.regs.size(), 0x4000);
    assert_eq!(port.regs.read32(0), 0xcafe_0001);
    assert!(port.reset.is_none(), "there is no PCI Express capability");
    assert!(model.cmb().is_none());
    for i in 0..100 {
        port.regs.write32(0x1000, i);
    }
    drop((port, model));
    let commands = fake.commands();
    let rung = commands.iter().filter(|c| c.starts_with("writel 0xe1801000 ")).count();
    assert_eq!(rung, 100, "posted writes are all executed");
    assert!(commands.iter().any(|c| c == "writel 0xe1800014 0x0"), "the controller is stopped");
}

#[test]
fn interrupt_lines_and_split_answers_are_read_over() {
    for (name, trouble) in [("irq", Trouble::Interrupts), ("dribble", Trouble::Dribbles)] {
        let fake = Fake::start(name);
        fake.make(trouble);
        let port = onehop_qtest::open(&fake.spec()).unwrap();
        for i in 0..100 {
            port.regs.write32(0x1000, i);
            assert_eq!(port.regs.read32(0), 0xcafe_0001);
        }
    }
}

#[test]
fn failures_read_as_all_ones_in_time_and_are_reported() {
    for (trouble, why) in [
        (Trouble::Silence, "did not answer within 1s"),
        (Trouble::OnlyInterrupts, "did not answer within 1s"),
        (Trouble::Garbage, "220 mail.example ESMTP"),
        (Trouble::Endless, "xxxx"),
        (Trouble::Truncated, "ended"),
        (Trouble::NoValue, "without a value"),
        (Trouble::Binary, "is this a qtest socket"),
    ] {
        let fake = Fake::start(&format!("{trouble:?}"));
        let model = QemuDrive::open_within(&fake.spec(), WAIT).unwrap();
        fake.make(trouble);
        let begin = Instant::now();
        assert_eq!(model.port().regs.read32(0), u32::MAX, "{trouble:?}");
        assert!(begin.elapsed() < 3 * WAIT, "{trouble:?} took {:?}", begin.elapsed());
        let reason = model.why_gone().unwrap();
        assert!(reason.contains(why), "{trouble:?}: {reason}");
        fake.make(Trouble::None);
        let begin = Instant::now();
        assert_eq!(model.port().regs.read32(0), u32::MAX, "{trouble:?}: a failure is permanent");
        assert!(begin.elapsed() < WAIT, "{trouble:?}");
    }
}

#[test]
fn silence_under_posted_writes_ends_in_time() {
    let fake = Fake::start("posted");
    let model = QemuDrive::open_within(&fake.spec(), WAIT).unwrap();
    fake.make(Trouble::Silence);
    let begin = Instant::now();
    for i in 0..100_000 {
        model.port().regs.write32(0x1000, i);
    }
    assert!(begin.elapsed() < 3 * WAIT);
    assert!(model.why_gone().is_some());
}

#[test]
fn trouble_while_opening_is_an_error_and_no_hang() {
    for trouble in [Trouble::Silence, Trouble::Garbage, Trouble::Truncated, Trouble::OnlyInterrupts] {
        let fake = Fake::start(&format!("open-{trouble:?}"));
        fake.make(trouble);
        let begin = Instant::now();
        let error = QemuDrive::open_within(&fake.spec(), WAIT).err().unwrap().to_string();
        assert!(error.contains("is gone"), "{error}");
        assert!(begin.elapsed() < 3 * WAIT);
    }
}

#[test]
fn a_missing_socket_error_says_how_to_start_qemu() {
    let fake = Fake::start("absent");
    let memory = fake.spec().split_once(',').unwrap().1.to_owned();
    let error = onehop_qtest::open(&format!("/nowhere/qt.sock,{memory}")).err().unwrap().to_string();
    assert!(error.contains("/nowhere/qt.sock") && error.contains("bed/qtest.sh start"), "{error}");
    // The fake still waits for a client.
    drop(onehop_qtest::open(&fake.spec()));
}
