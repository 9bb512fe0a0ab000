//! The cache against a model of it, and with several threads.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;

/// A fake device's registrations, by number.
#[derive(Clone, Default)]
struct FakeRegistrations(Arc<Mutex<BTreeMap<u64, Range<u64>>>>, Arc<AtomicU64>);

struct Region {
    fake: FakeRegistrations,
    number: u64,
    range: Range<u64>,
}

impl FakeRegistrations {
    fn make(&self, range: Range<u64>) -> Result<Region> {
        let number = self.1.fetch_add(1, Ordering::Relaxed);
        self.0.lock().unwrap().insert(number, range.clone());
        Ok(Region { fake: self.clone(), number, range })
    }

    fn live(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        assert!(self.fake.0.lock().unwrap().remove(&self.number).is_some(), "released twice");
    }
}

fn allocation(number: u64) -> Allocation {
    Allocation { of: *b"a GPU's 16 bytes", number }
}

const LEN: u64 = 16 * PAGE + 100;

#[test]
fn ranges_grow_to_pages_and_serve_what_lies_within() {
    let (fake, cache) = (FakeRegistrations::default(), Cache::new(CacheLimits::default()));
    let one = cache.get(allocation(1), LEN, 5000..5001, |range| fake.make(range)).unwrap();
    assert_eq!((one.range.clone(), one.offset()), (4096..8192, 904));
    let same = cache.get(allocation(1), LEN, 4096..8192, |_| panic!("registered twice")).unwrap();
    assert_eq!((same.number, same.offset()), (one.number, 0));
    let last = cache.get(allocation(1), LEN, LEN - 1..LEN, |range| fake.make(range)).unwrap();
    assert_eq!(last.range, 16 * PAGE..LEN);
    assert!(cache.get(allocation(1), LEN, LEN - 1..LEN + 1, |range| fake.make(range)).is_err());
    assert!(cache.get(allocation(1), LEN, 7..7, |range| fake.make(range)).is_err());
    // The same range of another allocation is different, even at the same address.
    let other = cache.get(allocation(2), LEN, 5000..5001, |range| fake.make(range)).unwrap();
    assert_ne!(other.number, one.number);
    assert_eq!(
        cache.account(),
        CacheCounters { hits: 1, misses: 3, evicted: 0, count: 3, bytes: 2 * PAGE + 100 }
    );
}

#[test]
fn freed_registrations_are_not_reused_and_stay_while_used() {
    let (fake, cache) = (FakeRegistrations::default(), Cache::new(CacheLimits::default()));
    let held = cache.get(allocation(1), LEN, 0..10, |range| fake.make(range)).unwrap();
    cache.forget(allocation(1));
    assert_eq!(fake.live(), 1);
    let again = cache.get(allocation(1), LEN, 0..10, |range| fake.make(range)).unwrap();
    assert_ne!(again.number, held.number);
    drop(held);
    assert_eq!(fake.live(), 1);
    // Freed while it is being registered: the requester gets it, and no one after.
    let racing = cache.get(allocation(3), LEN, 0..10, |range| {
        cache.forget(allocation(3));
        fake.make(range)
    });
    let number = racing.as_ref().map(|held| held.number).unwrap();
    let after = cache.get(allocation(3), LEN, 0..10, |range| fake.make(range)).unwrap();
    assert_ne!(after.number, number);
    drop((racing, after, again, cache));
    assert_eq!(fake.live(), 0);
}

#[test]
fn registrations_in_use_are_kept_and_failures_leave_no_trace() {
    let (fake, cache) = (FakeRegistrations::default(), Cache::new(CacheLimits { count: 2, bytes: 1 << 30 }));
    let _one = cache.get(allocation(1), LEN, 0..10, |range| fake.make(range)).unwrap();
    let two = cache.get(allocation(2), LEN, 0..10, |range| fake.make(range)).unwrap();
    let full = cache.get(allocation(3), LEN, 0..10, |range| fake.make(range));
    assert!(matches!(full, Err(Error::Full { held: 2, most: 2, .. })));
    drop(two);
    assert!(cache.get(allocation(3), LEN, 0..10, |_| Err(Error::Broken("x".into()))).is_err());
    assert_eq!((cache.account().count, cache.account().evicted, fake.live()), (1, 1, 1));
    assert!(cache.get(allocation(3), LEN, 0..10, |range| fake.make(range)).is_ok());
    let bytes = Cache::new(CacheLimits { count: 9, bytes: 2 * PAGE });
    assert!(bytes.get(allocation(1), LEN, 0..3 * PAGE, |range| fake.make(range)).is_err());
}

#[test]
fn threads_register_a_common_range_once() {
    let (fake, cache) = (FakeRegistrations::default(), Cache::new(CacheLimits::default()));
    let (begun, other) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            cache.get(allocation(1), LEN, 0..10, |range| {
                begun.wait();
                other.wait();
                fake.make(range)
            })
        });
        begun.wait();
        let second = scope.spawn(|| cache.get(allocation(1), LEN, 0..10, |_| panic!("registered twice")));
        // While the first is being made, another is.
        let third = cache.get(allocation(1), LEN, PAGE..PAGE + 1, |range| fake.make(range)).unwrap();
        other.wait();
        let (first, second) = (first.join().unwrap().unwrap(), second.join().unwrap().unwrap());
        assert_eq!(first.number, second.number);
        assert_ne!(third.number, first.number);
    });
    assert_eq!((cache.account().misses, cache.account().hits), (2, 1));
}

#[derive(Clone, Debug)]
enum CacheStep {
    Get { allocation: u64, start: u64, bytes: u64 },
    Drop(usize),
    Forget(u64),
}

fn steps() -> impl Strategy<Value = Vec<CacheStep>> {
    let get = (0..4_u64, 0..LEN, 1..5 * PAGE).prop_map(|(allocation, start, bytes)| CacheStep::Get {
        allocation,
        start,
        bytes,
    });
    let step = prop_oneof![6 => get, 5 => (0..8_usize).prop_map(CacheStep::Drop), 1 => (0..4_u64).prop_map(CacheStep::Forget)];
    prop::collection::vec(step, 1..120)
}

/// The expected content: allocation, range, last use, and number of users; and forgotten ones in use.
#[derive(Default)]
struct CacheModel {
    kept: Vec<(u64, Range<u64>, u64, usize)>,
    clock: u64,
}

impl CacheModel {
    fn bytes(&self) -> u64 {
        self.kept.iter().map(|(_, range, ..)| range.end - range.start).sum()
    }

    /// The range that serves the request; `None` if there is no room for it.
    fn get(&mut self, allocation: u64, range: &Range<u64>, limits: &CacheLimits) -> Option<Range<u64>> {
        self.clock += 1;
        let now = self.clock;
        let covers = |kept: &Range<u64>| kept.start <= range.start && range.end <= kept.end;
        if let Some(one) = self.kept.iter_mut().find(|one| one.0 == allocation && covers(&one.1)) {
            (one.2, one.3) = (now, one.3 + 1);
            return Some(one.1.clone());
        }
        let pages = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE).min(LEN);
        let bytes = pages.end - pages.start;
        while self.kept.len() >= limits.count || self.bytes() + bytes > limits.bytes {
            let idle = self.kept.iter().enumerate().filter(|(_, one)| one.3 == 0);
            let at = idle.min_by_key(|(_, one)| one.2)?.0;
            self.kept.remove(at);
        }
        self.kept.push((allocation, pages.clone(), now, 1));
        Some(pages)
    }
}

proptest! {
    #[test]
    fn it_does_what_the_model_does(steps in steps(), count in 1..6_usize, pages in 1..20_u64) {
        let limits = CacheLimits { count, bytes: pages * PAGE };
        let (fake, cache, mut model) = (FakeRegistrations::default(), Cache::new(limits), CacheModel::default());
        let mut held: Vec<(u64, HeldRegistration<Region>)> = Vec::new();
        for step in steps {
            match step {
                CacheStep::Get { allocation: of, start, bytes } => {
                    let range = start..(start + bytes).min(LEN);
                    let got = cache.get(allocation(of), LEN, range.clone(), |range| fake.make(range));
                    let expected = model.get(of, &range, &limits);
                    prop_assert_eq!(got.as_ref().ok().map(|held| held.range.clone()), expected);
                    if let Ok(got) = got {
                        prop_assert_eq!(got.range.start + got.offset(), range.start);
                        held.push((of, got));
                    }
                }
                CacheStep::Drop(at) if at < held.len() => {
                    let (of, gone) = held.swap_remove(at);
                    let same = |one: &&mut (u64, Range<u64>, u64, usize)| one.0 == of && one.1 == gone.range;
                    // A forgotten one may have a younger twin.
                    let is_kept = cache.holds(allocation(of), &gone);
                    if let (Some(one), true) = (model.kept.iter_mut().find(same), is_kept) {
                        one.3 -= 1;
                    }
                }
                CacheStep::Drop(_) => {}
                CacheStep::Forget(of) => {
                    cache.forget(allocation(of));
                    model.kept.retain(|one| one.0 != of);
                }
            }
            let account = cache.account();
            prop_assert_eq!((account.count, account.bytes), (model.kept.len(), model.bytes()));
            prop_assert!(account.count <= limits.count && account.bytes <= limits.bytes);
            // Everything held is registered, and nothing else except what the cache keeps.
            let live = fake.0.lock().unwrap();
            prop_assert!(held.iter().all(|(_, one)| live.contains_key(&one.number)));
            let unkept: std::collections::BTreeSet<u64> =
                held.iter().filter(|(of, one)| !cache.holds(allocation(*of), one)).map(|(_, one)| one.number).collect();
            prop_assert_eq!(live.len(), account.count + unkept.len());
        }
        drop((held, cache));
        prop_assert_eq!(fake.live(), 0);
    }
}

impl<R> Cache<R> {
    /// Whether this very registration is in the cache.
    fn holds(&self, allocation: Allocation, held: &HeldRegistration<R>) -> bool {
        let state = self.lock();
        let slots = state.of.get(&allocation).into_iter().flatten();
        slots
            .into_iter()
            .any(|slot| matches!(&slot.what, SlotContent::Here(entry) if Arc::ptr_eq(entry, &held.entry)))
    }
}
