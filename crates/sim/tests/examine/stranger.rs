//! Random accesses: no matter what is written, the simulator neither panics nor hangs.

use onehop_proto::Sqe;
use onehop_proto::regs::{Cc, offset};
use onehop_sim::{Config, Fault, Sim};

use crate::host::{Dice, Host};

/// A random value, often a significant one.
fn value(dice: &mut Dice, known: &[u64]) -> u64 {
    match dice.roll(6) {
        0 => dice.roll(u64::MAX),
        1 => 0,
        2 => u64::MAX - dice.roll(5000),
        3 => 1 << dice.roll(64),
        4 => dice.roll(32),
        _ => known[dice.roll(known.len() as u64) as usize] + [0, 0, 4096, 8][dice.roll(4) as usize],
    }
}

fn entry(dice: &mut Dice, known: &[u64]) -> Sqe {
    let opcodes = [0, 1, 2, 4, 5, 6, 8, 9, 0xa, 0xc, 0x7c];
    let mut sqe = Sqe::new(opcodes[dice.roll(11) as usize], dice.roll(4) as u32);
    for i in [4, 6, 8] {
        sqe = sqe.with_qword(i, value(dice, known));
    }
    for i in 10..16 {
        let dword = if dice.roll(2) == 0 { 0 } else { value(dice, known) as u32 };
        sqe = sqe.with_dw(i, dword);
    }
    if dice.roll(8) == 0 {
        sqe.dw[dice.roll(16) as usize] = dice.roll(1 << 32) as u32;
    }
    sqe.with_cid(dice.roll(40) as u16)
}

fn scribble(spec: &str, seed: u64) {
    let mut host = Host::with_queue(spec, 16);
    let mut dice = Dice(seed | 1);
    let data = host.buffer(65536);
    let known: Vec<u64> =
        [&data, &host.queues[&0].sq, &host.queues[&1].cq].iter().map(|b| b.addr()).collect();
    for i in 0..512 {
        data.mem.write(i * 8, &value(&mut dice, &known).to_le_bytes()).unwrap();
    }
    for _ in 0..400 {
        let qid = dice.roll(2) as u16;
        match dice.roll(12) {
            0 => {
                let at = (dice.roll(0x60) * 4 + dice.roll(20) / 19) as u32;
                host.regs.write32(at, value(&mut dice, &known) as u32);
                host.regs.read32(at);
            }
            1 => host.ring_sq(dice.roll(5) as u16, value(&mut dice, &known) as u32),
            2 => host.ring_cq(dice.roll(5) as u16, value(&mut dice, &known) as u32),
            3 => {
                host.sim.step();
            }
            4 => {
                let kinds = onehop_sim::FaultKind::ALL;
                let mut fault = Fault::new(kinds[dice.roll(kinds.len() as u64) as usize]);
                (fault.count, fault.when.lba) = (Some(2), Some(0..=5));
                host.sim.inject(fault);
            }
            5 if host.csts().cfs() || host.csts().gone() || !host.csts().rdy() => {
                host.sim.power_cycle();
                host.regs.write32(offset::CC, 0);
                host.set_admin_queue();
                host.regs.write32(offset::CC, Cc::enabled(12, 0).0);
            }
            _ => {
                let sqe = entry(&mut dice, &known);
                host.queues.get_mut(&qid).unwrap().put(&sqe);
                host.ring(qid);
                while host.poll(qid).is_some() {}
            }
        }
    }
    assert!(host.sim.violations().len() <= 4096);
}

#[test]
fn any_register_and_any_command() {
    let base = "mem:1M?queues=3&mqes=31&ns=2&to=1";
    for seed in 0..40 {
        for more in ["workers=0", "workers=0&cmb=64K&dbbuf=1&sgl=1&hmb=8&ms=8", "workers=0&cqr=0&ext=1&ms=16"]
        {
            scribble(&format!("{base}&{more}"), seed * 7919 + 1);
        }
    }
    scribble(&format!("{base}&workers=1&cmb=64K"), 5);
    scribble(&format!("{base}&workers=0&null=1"), 6);
}

#[test]
fn any_description() {
    let words = [
        "mem:",
        "64K",
        "?",
        "&",
        "=",
        "@",
        ",",
        "fault",
        "late",
        "n",
        "1",
        "0",
        "-1",
        "lba",
        "4096",
        "ns",
        "3",
        "%",
        "size",
        "18446744073709551615",
        "crdt",
        "T",
        "p",
        "1e9",
        "nan",
        "op",
        "read|",
        "/",
        "delay",
        "9s",
        "ms",
        "64",
    ];
    let mut dice = Dice(77);
    for _ in 0..20_000 {
        let text: String =
            (0..dice.roll(14)).map(|_| words[dice.roll(words.len() as u64) as usize]).collect();
        let Ok(mut config) = Config::parse(&format!("mem:64K?{text}")) else { continue };
        config.workers = false;
        let _ = Sim::new(config);
    }
}
