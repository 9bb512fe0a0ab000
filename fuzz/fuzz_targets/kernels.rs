//! GPU kernels against a faulty controller: they return, stay within their memory, and report each command correctly.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_fuzz::{At, Bed, Post};
use onehop_proto::kernel::{
    Exit, ItemOutcome, Job, OwnerQueue, WorkItem, run_group, run_owner, run_shared, scratch_bytes,
    scratch_init, share,
};
use onehop_proto::queue::{Address, Memory, Rings, Shared, SharedLayout};

#[derive(Arbitrary, Debug)]
struct Input {
    sq: u8,
    cq: u8,
    window: u8,
    lanes: u8,
    count: u8,
    stride: u8,
    retries: u8,
    retry_delay: [u8; 4],
    stall: u8,
    shared: bool,
    group: bool,
    launches: u8,
    script: Vec<Post>,
}

/// Clock ticks per launch.
const LIMIT: u64 = 3000;

fuzz_target!(|input: Input| {
    let count = u32::from(input.count);
    let bytes = [count * WorkItem::BYTES, count * ItemOutcome::BYTES, 4];
    if input.shared { shared(&input, bytes) } else { owner(&input, bytes) }
});

fn job(input: &Input, bed: &Bed, extra: &[At]) -> Job<Bed> {
    Job {
        works: extra[0],
        outcomes: extra[1],
        count: u32::from(input.count),
        nsid: 1,
        retries: u32::from(input.retries),
        retry_delay: input.retry_delay.map(u64::from),
        stall: u64::from(input.stall) * 4,
        deadline: bed.now() + LIMIT,
        poison: extra[2],
    }
}

fn owner(input: &Input, bytes: [u32; 3]) {
    let entries = |byte: u8| 2 + u32::from(byte) % 63;
    let window = 1 + u32::from(input.window) % 80;
    let extra = [bytes[0], bytes[1], bytes[2], scratch_bytes(window)];
    let (bed, rings, extra) = Bed::new(entries(input.sq), entries(input.cq), &extra);
    let bed = bed.with_lanes(1 + u32::from(input.lanes) % 40);
    let queue = OwnerQueue { rings, scratch: extra[3], window };
    scratch_init(&bed, queue.scratch);
    let of = u32::from(input.stride).max(1);
    let (first, end) = share(count(input), of / 2, of);
    let mine = first..end;
    run(input, &bed, &rings, &extra, mine, |job| {
        Exit::from_words(run_owner(&bed, || queue, job, first, end)).expect("the words of an exit")
    });
}

fn shared(input: &Input, bytes: [u32; 3]) {
    let entries = |byte: u8| 2 << (byte % 6);
    let (sq, cq) = (entries(input.sq), entries(input.cq));
    let layout = SharedLayout::new(sq, cq).expect("powers of two");
    let (bed, rings, extra) = Bed::new(sq, cq, &[bytes[0], bytes[1], bytes[2], layout.bytes()]);
    let bed = bed.with_lanes(1 + u32::from(input.lanes) % 40);
    let queue = Shared::new(rings, extra[3]).expect("powers of two");
    queue.initialise(&bed);
    if input.group {
        let count = count(input);
        return run(input, &bed, &rings, &extra, 0..count, |job| {
            Exit::from_words(run_group(&bed, &queue, job, (0, count), (1, 3))).expect("the words of an exit")
        });
    }
    let stride = u32::from(input.stride).max(1);
    let mine = (0..count(input)).step_by(stride as usize);
    run(input, &bed, &rings, &extra, mine, |job| run_shared(&bed, &queue, job, 0, stride));
}

fn count(input: &Input) -> u32 {
    u32::from(input.count)
}

fn run(
    input: &Input,
    bed: &Bed,
    rings: &Rings<Bed>,
    extra: &[At],
    items: impl Iterator<Item = u32> + Clone,
    launch: impl Fn(&Job<Bed>) -> Exit,
) {
    bed.script.replace(input.script.clone());
    for _ in 0..=input.launches % 3 {
        let job = job(input, bed, extra);
        let outcome = |item: u32| bed.word(extra[1].plus(item * ItemOutcome::BYTES));
        (0..job.count).for_each(|item| outcome(item).set(ItemOutcome::Pending.word()));
        let exit = launch(&job);
        assert_eq!(Exit::from_words(exit.words()), Some(exit));
        let mine = || items.clone().map(|item| ItemOutcome::from_word(outcome(item).get()));
        let honest = bed.controller.borrow().is_honest();
        if exit == Exit::Finished {
            assert!(mine().all(|o| matches!(o, ItemOutcome::Done(_))), "it finished, but not everything");
            assert!(
                !honest || bed.controller.borrow().owes() == 0,
                "commands are in flight that nobody waits for"
            );
        }
        assert!(
            !honest || !matches!(exit, Exit::UnexpectedCompletion(_)),
            "a proper completion is taken for a stray"
        );
        let unknown = mine().filter(|o| *o == ItemOutcome::Unknown).count();
        assert!(unknown as u32 <= rings.capacity());
        // The controller may still write to memory of unfinished commands: it must not be reported as free.
        assert!(!honest || unknown >= bed.controller.borrow().owes(), "memory in use is given up");
        if exit != Exit::Finished {
            // The queue is then reset, but commands in flight remain with the controller.
            return;
        }
    }
}
