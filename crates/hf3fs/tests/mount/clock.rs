//! How long the attacks take together: CI has three minutes for them.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::bed::how_long;

/// How long any attack goes on, in all. Not where a person wants them to take longer (`crates/hf3fs/hostile`).
const BOUND: Duration = Duration::from_secs(180);
/// Attacks that are named when this is reported.
const NAMED: usize = 8;

/// The attacks of a run. Those that run side by side count once.
struct Clock {
    running: usize,
    /// When the first of those began.
    since: Option<Instant>,
    before: Duration,
    /// How long each took, and its name.
    ended: Vec<(Duration, String)>,
}

static CLOCK: Mutex<Clock> = Mutex::new(Clock::new());

impl Clock {
    const fn new() -> Self {
        Self { running: 0, since: None, before: Duration::ZERO, ended: Vec::new() }
    }

    fn begin(&mut self, now: Instant) {
        self.running += 1;
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant, began: Instant, name: &str) {
        self.ended.push((now - began, name.into()));
        self.running -= 1;
        if self.running == 0 {
            self.before = self.total(now);
            self.since = None;
        }
    }

    fn total(&self, now: Instant) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now - since)
    }

    fn report(&self, now: Instant) -> String {
        let mut longest: Vec<_> = self.ended.iter().collect();
        longest.sort_by(|one, other| other.cmp(one));
        let named: Vec<_> = longest
            .iter()
            .take(NAMED)
            .map(|(took, name)| format!("{name} {:.1} s", took.as_secs_f64()))
            .collect();
        let (total, bound, count) = (self.total(now).as_secs_f64(), BOUND.as_secs(), self.ended.len());
        format!("{count} attacks took {total:.1} s together, of {bound} s; the longest: {}", named.join(", "))
    }

    /// What is to be said where they take too long.
    fn check(&self, now: Instant) -> Result<(), String> {
        if self.total(now) <= BOUND { Ok(()) } else { Err(format!("too long: {}", self.report(now))) }
    }
}

fn clock() -> MutexGuard<'static, Clock> {
    CLOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An attack that goes on. Dropped, it ends, and fails where all of them have taken too long.
pub struct Attack {
    began: Instant,
    name: String,
}

impl Attack {
    #[track_caller]
    pub fn begin() -> Self {
        static REPORT: Once = Once::new();
        // Without room for it, nothing is reported.
        // SAFETY: a function of this program that takes nothing and does not unwind.
        REPORT.call_once(|| _ = unsafe { libc::atexit(report) });
        // With one thread for all tests, that has no test's name.
        let thread = std::thread::current().name().filter(|name| *name != "main").map(str::to_owned);
        let name = thread.unwrap_or_else(|| std::panic::Location::caller().to_string());
        let began = Instant::now();
        clock().begin(began);
        Self { began, name }
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        let (now, mut clock) = (Instant::now(), clock());
        clock.end(now, self.began, &self.name);
        let checked = clock.check(now);
        drop(clock);
        let is_bounded = how_long(Duration::ZERO).is_zero();
        if is_bounded && !std::thread::panicking() {
            assert_eq!(checked, Ok(()));
        }
    }
}

/// At the end of the tests. Not by a test, which does not know whether it is the last.
extern "C" fn report() {
    let _ = writeln!(std::io::stderr(), "{}", clock().report(Instant::now()));
}

#[test]
fn attacks_that_take_too_long_are_named() {
    let (start, mut clock) = (Instant::now(), Clock::new());
    let at = |seconds| start + Duration::from_secs(seconds);
    clock.begin(at(0));
    clock.begin(at(10));
    clock.end(at(90), at(0), "one");
    clock.end(at(110), at(10), "other");
    // Nothing goes on meanwhile.
    clock.begin(at(200));
    clock.end(at(270), at(200), "last");
    assert_eq!((clock.total(at(300)), clock.check(at(300))), (BOUND, Ok(())));
    clock.begin(at(300));
    let said = "too long: 3 attacks took 181.0 s together, of 180 s; the longest: other 100.0 s, one 90.0 s, last 70.0 s";
    assert_eq!(clock.check(at(301)), Err(said.into()));
}
