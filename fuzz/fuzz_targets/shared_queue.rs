//! Shared mode against a faulty controller: every wait ends, no command completes twice, no slot has two owners.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_fuzz::{Bed, Post};
use onehop_proto::Sqe;
use onehop_proto::queue::{Address, Memory, NO_CID, Shared, SharedLayout, SubmitError, Token};

#[derive(Arbitrary, Debug)]
struct Input {
    sq_shift: u8,
    cq_shift: u8,
    /// Completions posted while the queue waits or rings.
    script: Vec<Post>,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Submit { patience: u8 },
    Test(u8),
    Wait { which: u8, patience: u8 },
    Drain,
    Poison(u32),
    Post(Post),
}

fuzz_target!(|input: Input| {
    let entries = |shift: u8| 2 << (shift % 6);
    let (sq, cq) = (entries(input.sq_shift), entries(input.cq_shift));
    let layout = SharedLayout::new(sq, cq).expect("powers of two");
    let (bed, rings, extra) = Bed::new(sq, cq, &[layout.bytes()]);
    let control = extra[0];
    let queue = Shared::new(rings, control).expect("powers of two");
    queue.initialise(&bed);
    bed.script.replace(input.script);
    let mut tokens: Vec<Token> = Vec::new();
    let bounds = |patience: u8| queue.bounds(bed.now() + u64::from(patience));
    for step in &input.steps {
        match step {
            Step::Submit { patience } => match queue.submit(&bed, &Sqe::new(2, 1), &bounds(*patience)) {
                Ok(token) => {
                    assert!(token.cid() != NO_CID && tokens.iter().all(|other| other.cid() != token.cid()));
                    tokens.push(token);
                }
                Err(SubmitError::Stopped(_)) => {}
                Err(error) => unreachable!("nobody else holds a lock or a ticket: {error:?}"),
            },
            Step::Test(which) => {
                if let Some(i) = pick(&tokens, *which)
                    && queue.test(&bed, &tokens[i]).is_some()
                {
                    let _spent = tokens.swap_remove(i);
                }
            }
            Step::Wait { which, patience } => {
                if let Some(i) = pick(&tokens, *which)
                    && queue.wait(&bed, &tokens[i], &bounds(*patience)).is_ok()
                {
                    let _spent = tokens.swap_remove(i);
                }
            }
            Step::Drain => _ = queue.drain(&bed),
            Step::Poison(code) => bed.store(control.plus(layout.poison()), *code),
            Step::Post(post) => bed.post(post),
        }
        assert!(tokens.len() as u32 <= layout.capacity());
        let strays = bed.load(control.plus(layout.unexpected_completions()));
        assert!(
            strays == 0 || !bed.controller.borrow().is_honest(),
            "a proper completion is taken for a stray"
        );
    }
});

fn pick(tokens: &[Token], which: u8) -> Option<usize> {
    usize::from(which).checked_rem(tokens.len())
}
