//! Kernels for marks on a full GPU.

use super::*;

const WORDS: u64 = 40_000;
const MARKS: Marks = Marks { first: 16, count: WORDS, word: 0x0123_4567_89ab_cdef };
const BRIEF: Duration = Duration::from_millis(50);

/// Memory without marks, and its content.
fn unmarked(gpu: &CudaGpu) -> (Region, Vec<u8>) {
    let region = gpu.alloc_device(DeviceKind::Plain, 8 * WORDS as usize + 64).unwrap();
    let others = vec![0xa5; region.len()];
    region.write(0, &others).unwrap();
    (region, others)
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// The GPU is full of other kernels, and by the time there is room the memory belongs to other code.
#[test]
fn a_kernel_that_comes_late_marks_nothing() {
    let Some(model) = Model::or_child("marks::a_kernel_that_comes_late_marks_nothing") else { return };
    let gpu = gpu();
    let (region, others) = unmarked(&gpu);
    for round in 0..3 {
        model.set("full", 1);
        let start = Instant::now();
        let why = region.mark(&MARKS, BRIEF).unwrap_err().to_string();
        assert!(why.contains("was cancelled") && start.elapsed() < Duration::from_secs(2), "{why}");
        // Copies do not wait for it.
        region.write(0, &others).unwrap();
        model.set("full", 0);
        assert!(bytes(&region) == others, "round {round}: memory was marked that others have again");
        region.mark(&MARKS, TEST_TIMEOUT).unwrap();
        assert_eq!(region.marks_left(&MARKS, TEST_TIMEOUT).unwrap(), WORDS);
        region.write(16, &others[16..]).unwrap();
        assert_eq!(region.marks_left(&MARKS, TEST_TIMEOUT).unwrap(), 0);
    }
    drop((region, gpu));
    model.wait_for("live", 0);
}

/// The error says that the memory must not be used; the next marks are placed normally.
#[test]
fn a_kernel_that_writes_is_not_cancelled() {
    let Some(model) = Model::or_child("marks::a_kernel_that_writes_is_not_cancelled") else { return };
    let gpu = gpu();
    let (region, _) = unmarked(&gpu);
    model.set("full", 2);
    let why = region.mark(&MARKS, BRIEF).unwrap_err().to_string();
    assert!(why.contains("still writing"), "{why}");
    // What it uses is not freed before it has ended.
    let live = model.get("live");
    drop(region);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(model.get("live"), live);
    model.set("full", 0);
    let (region, _) = unmarked(&gpu);
    region.mark(&MARKS, TEST_TIMEOUT).unwrap();
    assert_eq!(region.marks_left(&MARKS, TEST_TIMEOUT).unwrap(), WORDS);
    drop((region, gpu));
    model.wait_for("live", 0);
}

#[test]
fn a_question_for_marks_is_answered_in_time() {
    let Some(model) = Model::or_child("marks::a_question_for_marks_is_answered_in_time") else { return };
    let gpu = gpu();
    let (region, _) = unmarked(&gpu);
    region.mark(&MARKS, TEST_TIMEOUT).unwrap();
    model.set("full", 1);
    let start = Instant::now();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let ask = || region.marks_left(&MARKS, 4 * BRIEF).map_err(|error| error.to_string());
        let threads = [scope.spawn(ask), scope.spawn(ask)];
        threads.map(|thread| thread.join().unwrap()).into()
    });
    assert!(answers.iter().all(Result::is_err) && start.elapsed() < Duration::from_secs(5), "{answers:?}");
    model.set("full", 0);
    assert_eq!(region.marks_left(&MARKS, TEST_TIMEOUT).unwrap(), WORDS);
}
