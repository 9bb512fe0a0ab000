//! Deliberate faults, for the tools that detect them: `.ci/sanitize` checks that each tool finds one before it trusts
//! the tool. Nothing happens unless `ONEHOP_PLANTED` names a fault.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

struct Shared(*mut u64);

// SAFETY: none; that is the fault.
unsafe impl Sync for Shared {}

impl Shared {
    fn write(&self, value: u64) {
        // SAFETY: none; two threads write at once.
        unsafe { self.0.write(value) };
    }
}

#[test]
fn planted() {
    let fault = std::env::var("ONEHOP_PLANTED").unwrap_or_default();
    match fault.as_str() {
        "" => {}
        "use_after_free" => {
            let at = black_box(Box::into_raw(Box::new(7_u64)));
            // SAFETY: it is a box.
            drop(unsafe { Box::from_raw(at) });
            // SAFETY: none; it is gone.
            assert!(black_box(unsafe { at.read_volatile() }) < u64::MAX);
        }
        "race" => {
            let mut place = 0;
            // Both start at once: one must not end before the other begins.
            let (shared, both) = (Shared(&raw mut place), Barrier::new(2));
            let write = || {
                both.wait();
                (0..1000).for_each(|value| shared.write(black_box(value)));
            };
            thread::scope(|scope| {
                scope.spawn(write);
                scope.spawn(write);
            });
            assert!(black_box(place) < 1000);
        }
        other => panic!("there is no fault '{other}'"),
    }
}
