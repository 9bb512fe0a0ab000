//! Lets threads of the emulated GPU meet by chance, as lanes of a warp do: one of them acts for all.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use onehop_proto::GpuAddr;

/// How often the first thread lets others run before it acts.
const YIELDS: u32 = 3;

/// The meeting point of a warp's threads.
#[derive(Default)]
pub(crate) struct Meeting(Mutex<Option<Round>>);

/// The threads that are present, before one of them acts.
struct Round {
    at: GpuAddr,
    count: u32,
    result: Arc<SharedResult>,
}

/// The result that the acting thread shares with the others.
#[derive(Default)]
struct SharedResult(Mutex<Option<u64>>, Condvar);

impl SharedResult {
    fn publish(&self, word: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(word);
        self.1.notify_all();
    }

    fn wait(&self) -> u64 {
        let mut result = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match *result {
                Some(word) => return word,
                None => result = self.1.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// Releases the others even if the acting thread faults.
struct Acting(Arc<SharedResult>);

impl Drop for Acting {
    fn drop(&mut self) {
        self.0.publish(0);
    }
}

impl Meeting {
    /// [`onehop_proto::queue::Memory::combine`].
    pub(crate) fn combine(&self, at: GpuAddr, f: impl FnOnce(u32) -> u64) -> (u64, u32) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let acting = match &mut *open {
            Some(round) if round.at == at => {
                let (rank, result) = (round.count, round.result.clone());
                round.count += 1;
                drop(open);
                return (result.wait(), rank);
            }
            Some(_) => {
                drop(open);
                return (f(1), 0);
            }
            None => {
                let result = Arc::<SharedResult>::default();
                *open = Some(Round { at, count: 1, result: result.clone() });
                Acting(result)
            }
        };
        drop(open);
        (0..YIELDS).for_each(|_| std::thread::yield_now());
        let round = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let word = f(round.map_or(1, |round| round.count));
        acting.0.publish(word);
        (word, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn threads_that_meet_share_a_result_and_others_do_not() {
        let (meeting, taken, calls) =
            (Meeting::default(), [const { AtomicU32::new(0) }; 2], AtomicU32::new(0));
        let numbers: Vec<Mutex<Vec<u64>>> = (0..2).map(|_| Mutex::default()).collect();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (meeting, taken, numbers, calls) = (&meeting, &taken, &numbers, &calls);
                scope.spawn(move || {
                    for _ in 0..500 {
                        let place = thread % 4 / 3;
                        let (first, rank) = meeting.combine(GpuAddr(place as u64), |count| {
                            calls.fetch_add(1, Ordering::Relaxed);
                            taken[place].fetch_add(count, Ordering::Relaxed).into()
                        });
                        numbers[place].lock().unwrap().push(first + u64::from(rank));
                    }
                });
            }
        });
        for (numbers, count) in numbers.into_iter().zip([3000, 1000]) {
            let mut numbers = numbers.into_inner().unwrap();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..count), "each number once");
        }
        assert!(calls.into_inner() < 4000, "nobody ever met");
    }

    #[test]
    fn a_fault_of_the_acting_thread_releases_the_others() {
        let meeting = Meeting::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        meeting.combine(GpuAddr(1), |_| std::panic::resume_unwind(Box::new(())))
                    }));
                    assert!(result.is_err() || result.is_ok_and(|(word, _)| word == 0));
                });
            }
        });
    }
}
