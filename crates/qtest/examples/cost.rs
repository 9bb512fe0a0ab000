//! Measures register accesses over the socket: `cargo run --release -p onehop-qtest --example cost`.

use std::time::Instant;

use onehop_qtest::bed::{Qemu, QemuOptions};

const COUNT: u32 = 20_000;

/// A register that takes any value while the controller is disabled: the low half of the admin queue's address.
const ASQ: u32 = 0x28;
const VERSION: u32 = 0x08;

fn main() -> Result<(), onehop_qtest::Error> {
    let Some(qemu) = Qemu::start_or_skip(&QemuOptions::default())? else { return Ok(()) };
    let begin = Instant::now();
    let port = qemu.port()?;
    println!("open                          {:8.1} us", begin.elapsed().as_secs_f64() * 1e6);
    let regs = &port.regs;
    measure("read32", || {
        regs.read32(VERSION);
    });
    measure("write32, posted", || regs.write32(ASQ, 0x1000));
    measure("write32, waited for by a read", || {
        regs.write32(ASQ, 0x1000);
        regs.read32(VERSION);
    });
    measure("four write32 and a read32", || {
        (0..4).for_each(|_| regs.write32(ASQ, 0x1000));
        regs.read32(VERSION);
    });
    if let Some(reset) = &port.reset {
        let begin = Instant::now();
        let done = reset.function_reset();
        println!("function level reset          {:8.1} us {done:?}", begin.elapsed().as_secs_f64() * 1e6);
    }
    Ok(())
}

fn measure(what: &str, mut run: impl FnMut()) {
    let begin = Instant::now();
    (0..COUNT).for_each(|_| run());
    println!("{what:<29} {:8.2} us", begin.elapsed().as_secs_f64() * 1e6 / f64::from(COUNT));
}
