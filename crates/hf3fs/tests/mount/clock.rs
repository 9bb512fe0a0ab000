//! A time limit for all attacks together, since CI has three minutes for them.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::bed::attack_time;

/// The time limit of all attacks. `crates/hf3fs/hostile` runs without it.
const TIME_LIMIT: Duration = Duration::from_secs(180);
/// How many attacks a report names.
const REPORTED: usize = 8;

/// The attacks of a run. Time in which several run counts once.
struct Clock {
    running: usize,
    /// When the first of the running attacks began.
    since: Option<Instant>,
    before: Duration,
    /// The duration of each attack, and its name.
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
            .take(REPORTED)
            .map(|(took, name)| format!("{name} {:.1} s", took.as_secs_f64()))
            .collect();
        let (total, limit, count) = (self.total(now).as_secs_f64(), TIME_LIMIT.as_secs(), self.ended.len());
        format!("{count} attacks took {total:.1} s together, of {limit} s; the longest: {}", named.join(", "))
    }

    /// The report as an error if they took too long.
    fn check(&self, now: Instant) -> Result<(), String> {
        if self.total(now) <= TIME_LIMIT { Ok(()) } else { Err(format!("too long: {}", self.report(now))) }
    }
}

fn clock() -> MutexGuard<'static, Clock> {
    CLOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running attack. Ends on drop, which panics if all attacks together took too long.
pub struct Attack {
    began: Instant,
    name: String,
}

impl Attack {
    #[track_caller]
    pub fn begin() -> Self {
        static REPORT: Once = Once::new();
        // If registration fails, nothing is reported.
        // SAFETY: the function takes nothing and does not unwind.
        REPORT.call_once(|| _ = unsafe { libc::atexit(report) });
        // With one test thread, the thread has no test's name.
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
        let is_bounded = attack_time(Duration::ZERO).is_zero();
        if is_bounded && !std::thread::panicking() {
            assert_eq!(checked, Ok(()));
        }
    }
}

/// Runs at exit: a test does not know whether it is the last.
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
    // No attack runs in between.
    clock.begin(at(200));
    clock.end(at(270), at(200), "last");
    assert_eq!((clock.total(at(300)), clock.check(at(300))), (TIME_LIMIT, Ok(())));
    clock.begin(at(300));
    let expected = "too long: 3 attacks took 181.0 s together, of 180 s; the longest: other 100.0 s, one 90.0 s, last 70.0 s";
    assert_eq!(clock.check(at(301)), Err(expected.into()));
}
