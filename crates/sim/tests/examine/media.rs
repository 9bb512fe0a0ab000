//! Images that persist, caches that do not, and refused configurations.

use std::path::PathBuf;

use onehop_proto::nvm::{self, flag};
use onehop_proto::{admin, feature};
use onehop_sim::{Config, open};

use crate::host::{Host, pattern};

/// A file that is removed on drop.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("onehop-sim-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }

    fn spec(&self, options: &str) -> String {
        format!("{}?{options}", self.0.display())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("img.meta"));
    }
}

#[test]
fn images_survive_the_drive() {
    let image = Image::new("survives.img");
    let data = pattern(1, 4096);
    {
        let mut host = Host::new(&image.spec("size=1M&workers=0&ns=2&ms=8"));
        let (buf, meta) = (host.buffer(4096), host.buffer(4096));
        buf.mem.write(0, &data).unwrap();
        meta.mem.write(0, &[5; 64]).unwrap();
        let sqe = nvm::write(2, 3, 8).unwrap().with_prps(buf.addr(), 0).with_mptr(meta.addr());
        assert!(host.run(1, sqe).status().is_ok());
    }
    assert_eq!(std::fs::metadata(&image.0).unwrap().len(), 1 << 20);
    let mut host = Host::new(&image.spec("workers=0&ns=2&ms=8"));
    let (buf, meta) = (host.buffer(4096), host.buffer(4096));
    let sqe = nvm::read(2, 3, 8).unwrap().with_prps(buf.addr(), 0).with_mptr(meta.addr());
    assert!(host.run(1, sqe).status().is_ok());
    assert_eq!((buf.read(4096), meta.read(64)), (data.clone(), vec![5; 64]));
    let mut out = vec![0; 4096];
    host.sim.read_media(2, 3 * 512, &mut out).unwrap();
    assert_eq!(out, data);
}

#[test]
fn images_are_refused_politely() {
    let image = Image::new("refused.img");
    let text = |spec: &str| open(spec).unwrap_err().to_string();
    assert!(text(&image.spec("")).contains("size=64M"));
    assert!(text("/tmp").contains("directory"));
    assert!(text("/dev/null").contains("regular file"));
    let _first = open(&image.spec("size=1M&workers=0")).unwrap();
    assert!(text(&image.spec("")).contains("another drive"));
    let tiny = Image::new("tiny.img");
    std::fs::write(&tiny.0, [0; 100]).unwrap();
    assert!(text(&tiny.spec("")).contains("block"));
    assert!(text("/nonexistent/x.img?size=1M").contains("/nonexistent"));
}

#[test]
fn unflushed_writes_are_lost_with_the_power() {
    let image = Image::new("cache.img");
    for media in ["mem:1M?", &format!("{}&size=1M", image.spec(""))] {
        let mut host = Host::new(&format!("{media}&workers=0"));
        let again = |host: &mut Host| {
            host.sim.power_cycle();
            host.enable();
            host.create_pair(1, 8);
            host.read(0, 4, 512).unwrap().chunks(512).map(|c| c[0]).collect::<Vec<_>>()
        };
        assert!(host.write(0, &[1; 2048], 512).is_ok());
        assert!(host.run(1, nvm::flush(1)).status().is_ok());
        assert!(host.write(1, &[2; 1024], 512).is_ok());
        assert_eq!(host.read(1, 1, 512).unwrap(), [2; 512], "acknowledged and visible");
        assert_eq!(again(&mut host), [1, 1, 1, 1]);
        let buf = host.buffer(4096);
        buf.mem.fill(0, 512, 3).unwrap();
        let fua = nvm::with_flags(nvm::write(1, 2, 1).unwrap(), flag::FUA).with_prps(buf.addr(), 0);
        assert!(host.run(1, fua).status().is_ok());
        assert!(host.write(3, &[4; 512], 512).is_ok());
        assert_eq!(again(&mut host), [1, 1, 3, 1]);
        host.admin_ok(admin::set_features(feature::id::VOLATILE_WRITE_CACHE, false, 0));
        assert!(host.write(3, &[5; 512], 512).is_ok());
        assert_eq!(again(&mut host), [1, 1, 3, 5]);
        host.sim.write_media(1, 0, &[6; 512]).unwrap();
        assert_eq!(again(&mut host), [6, 1, 3, 5]);
        host.clean();
    }
}

#[test]
fn unflushed_writes_survive_a_reset() {
    let mut host = Host::new("mem:1M?workers=0&nssrs=1");
    assert!(host.write(0, &[1; 512], 512).is_ok());
    host.disable();
    host.enable();
    host.port.reset.as_ref().unwrap().function_reset().unwrap();
    host.enable();
    host.create_pair(1, 8);
    assert_eq!(host.read(0, 1, 512).unwrap(), [1; 512]);
}

#[test]
fn drives_without_a_cache_lose_nothing() {
    let mut host = Host::new("mem:1M?workers=0&vwc=0");
    assert!(host.write(0, &[1; 512], 512).is_ok());
    host.sim.power_cycle();
    let mut out = [0; 512];
    host.sim.read_media(1, 0, &mut out).unwrap();
    assert_eq!(out, [1; 512]);
}

#[test]
fn configurations_are_checked() {
    let text = |spec: &str| Config::parse(spec).unwrap_err().to_string();
    let unknown = text("mem:1M?mtds=5");
    assert!(unknown.contains("'mtds'") && unknown.contains("mdts"), "{unknown}");
    assert!(text("mem:1M?lba=1000").contains("lba=1000"));
    assert!(text("mem:1M?queues=many").contains("queues=many"));
    assert!(text("mem:lots").contains("lots"));
    for bad in [
        "",
        "mem:0",
        "mem:1M?ms=9",
        "mem:1M?mqes=0",
        "mem:1M?mqes=65536",
        "mem:1M?dstrd=5",
        "mem:1M?queues=0",
        "mem:1M?version=1.3",
        "mem:1M?cmb=1000",
        "mem:1M?mpsmin=3&mpsmax=2",
        "mem:1M?ns=0",
        "mem:1M?crto=3",
        "mem:1M?lba=64K&mdts=3",
        "mem:1M?ready=9s&to=1",
        "mem:1M?workers=2",
        "mem:1M?latency=5",
        "mem:1M?serial=123456789012345678901",
        "mem:1M?crdt=1,2",
        "mem:1M?null=2",
        "mem:1M?fault",
        "mem:1M?mdts=99",
    ] {
        assert!(Config::parse(bad).is_err(), "{bad}");
    }
    assert!(Config::options().iter().all(|(name, means)| !name.is_empty() && means.len() > 5));
    let config =
        Config::parse("mem:2GiB?lba=4096&mdts=5&queues=8&mqes=63&dstrd=2&cmb=16M&latency=50us").unwrap();
    assert_eq!((config.lba, config.mqes_z, config.cmb), (4096, 63, 16 << 20));
}

#[test]
fn drives_go_with_their_last_handle() {
    let host = Host::new("mem:1M?workers=1&fault=late@delay=9s");
    let (regs, image) = (host.regs.clone(), Image::new("handles.img"));
    drop(host);
    assert_eq!(regs.read32(0x1c) & 1, 1, "the port alone keeps it alive");
    drop(regs);
    for _ in 0..3 {
        // The image is unlocked as soon as the drive is dropped.
        let sim = open(&image.spec("size=1M")).unwrap();
        let port = sim.port();
        drop(sim);
        drop(port);
    }
}
