//! The memory of an array: reused by its own kernels, and left to threads that an array is closed under.

use std::sync::mpsc;
use std::time::Duration;

use onehop_array::{ArrayError, ArrayOptions, Error};
use onehop_proto::queue::Memory;

use crate::{Pages, bed, options, word};

#[test]
fn kernels_use_the_memory_of_those_before() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 64));
    let rows = array.rows(256, 256);
    let ids: Vec<u64> = (0..300).map(|id| id * 7).collect();
    let out = bed.region(ids.len() * 256);
    let all = || {
        assert_eq!(array.gather(rows, &ids, &out).unwrap().failed, []);
        assert_eq!(array.scatter(rows, &ids[..100], &out).unwrap().failed, []);
        assert_eq!(array.read(rows, &ids[..200], &out).unwrap().failed, []);
        array.flush().unwrap();
        // This one is refused.
        array.gather(rows, &ids, &out.slice(0..256).unwrap()).unwrap_err();
    };
    all();
    // The emulated GPU gives no address twice.
    let next = || bed.region(4).addr().0;
    let (first, second) = (next(), next());
    (0..3).for_each(|_| all());
    assert_eq!(next() - second, second - first, "something was allocated");
    array.close().unwrap();
}

#[test]
fn rows_that_no_thread_answers_are_not_pending() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 8));
    let (rows, handle) = (array.rows(256, 256), array.handle());
    // The kernel does not find the array.
    bed.run(&array, 1, move |mem, _, _| mem.store(handle, 0));
    let (moved, _) = bed.gather(&array, rows, &[1, 2]);
    assert_eq!(moved.failed, [(0, ArrayError::NoArray), (1, ArrayError::NoArray)]);
}

/// Starts a thread that pins a page; returns when it has.
fn pin_a_page(
    bed: &crate::Bed,
    handle: onehop_proto::GpuAddr,
    then: impl Fn() + Send + Sync + 'static,
) -> Box<dyn onehop_gpu::Running> {
    let (sender, pinned) = mpsc::sync_channel(1);
    let running = bed.gpu.start(1, move |mem, _| {
        let array = Pages::open(mem, handle).unwrap();
        let pin = array.pin(mem, 4096).unwrap();
        sender.send(()).unwrap();
        then();
        assert_eq!(mem.load(pin.address()), word(1024));
        // The next one needs the drive, if the array is over.
        let next = array.pin(mem, 9 * 4096).map(|pin| mem.load(pin.address()));
        assert!(matches!(next, Err(ArrayError::Read(_))) || next == Ok(word(9 * 1024)), "{next:?}");
    });
    pinned.recv().unwrap();
    running.unwrap()
}

#[test]
fn an_array_leaves_its_memory_to_threads_that_it_is_closed_under() {
    let bed = bed("mem:16M");
    for is_closed in [true, false] {
        let array = bed.array(ArrayOptions { patience: Duration::from_millis(50), ..options(4096, 8) });
        let (end, ended) = mpsc::sync_channel(1);
        let ended = std::sync::Mutex::new(ended);
        let running = pin_a_page(&bed, array.handle(), move || ended.lock().unwrap().recv().unwrap());
        if is_closed {
            let closed = array.close();
            assert!(matches!(closed, Err(Error::InUse { .. })), "{closed:?}");
        } else {
            drop(array);
        }
        end.send(()).unwrap();
        running.join().unwrap();
    }
    // The drive and its queues are not affected.
    bed.array(options(4096, 8)).close().unwrap();
}

#[test]
fn an_array_that_is_closed_waits_for_threads_to_end() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 8));
    let running = pin_a_page(&bed, array.handle(), || std::thread::sleep(Duration::from_millis(300)));
    array.close().unwrap();
    running.join().unwrap();
}
