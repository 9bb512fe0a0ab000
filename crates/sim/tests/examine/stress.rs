//! Many commands, with every byte compared.

use onehop_proto::nvm;

use crate::host::{Dice, Host, pattern};

/// Random reads and writes of 4 KiB, in batches, against a copy in memory.
fn churn(spec: &str, commands: u32) -> f64 {
    const BLOCKS: u64 = 2048;
    const BATCH: usize = 16;
    let mut host = Host::with_queue(spec, 32);
    let mut copy = vec![0u8; BLOCKS as usize * 4096];
    let bufs: Vec<_> = (0..BATCH).map(|_| host.buffer(4096)).collect();
    let (mut dice, mut out) = (Dice(88172645463325252), vec![0; 4096]);
    let patterns: Vec<_> = (0..64).map(|i| pattern(i, 4096)).collect();
    let start = std::time::Instant::now();
    for _ in 0..commands as usize / BATCH {
        let first = dice.roll(BLOCKS);
        let mut reads = Vec::new();
        for (i, buf) in bufs.iter().enumerate() {
            // Blocks of one batch are distinct, because their order is undefined.
            let block = (first + i as u64 * 97) % BLOCKS;
            let sqe = if dice.roll(2) == 0 {
                let data = &patterns[dice.roll(64) as usize];
                buf.mem.write(0, data).unwrap();
                copy[block as usize * 4096..][..4096].copy_from_slice(data);
                nvm::write(1, block, 1)
            } else {
                reads.push((i, block as usize));
                nvm::read(1, block, 1)
            };
            host.push(1, sqe.unwrap().with_prps(buf.addr(), 0));
        }
        host.ring(1);
        let mut left = BATCH;
        while left > 0 {
            match host.poll_silently(1) {
                Some(cqe) => {
                    assert!(cqe.status().is_ok());
                    left -= 1;
                }
                None => std::thread::yield_now(),
            }
        }
        host.ring_cq(1, host.queues[&1].head);
        for (i, block) in reads {
            bufs[i].mem.read(0, &mut out).unwrap();
            assert!(out == copy[block * 4096..][..4096], "block {block}");
        }
    }
    host.clean();
    f64::from(commands) / start.elapsed().as_secs_f64()
}

#[test]
fn inline_and_with_a_worker() {
    for spec in ["mem:8M?lba=4096&workers=0", "mem:8M?lba=4096&workers=1"] {
        println!("{spec}: {:.0} commands a second", churn(spec, 20_000));
    }
}

#[test]
fn a_million() {
    println!("{:.0} commands a second", churn("mem:8M?lba=4096&workers=0", 1_000_000));
}

#[test]
fn many_threads_on_their_own_queues() {
    use std::sync::Arc;
    let mut host = Host::enabled("mem:8M?workers=1&queues=4");
    for qid in 1..=4 {
        host.create_pair(qid, 16);
    }
    let mut queues: Vec<_> = (1..=4).map(|qid| (qid, host.queues.remove(&qid).unwrap())).collect();
    let shared = Arc::new(host);
    std::thread::scope(|scope| {
        for (qid, queue) in &mut queues {
            let host = shared.clone();
            scope.spawn(move || {
                for i in 0..2000u16 {
                    queue.put(&nvm::flush(1).with_cid(i));
                    host.ring_sq(*qid, queue.tail);
                    let cqe = loop {
                        match queue.take() {
                            Some(cqe) => break cqe,
                            None => std::thread::yield_now(),
                        }
                    };
                    assert_eq!((cqe.cid(), cqe.sqid()), (i, *qid));
                    host.ring_cq(*qid, queue.head);
                }
            });
        }
    });
    shared.clean();
    assert_eq!(shared.sim.stats().io_commands(), 8000);
}
