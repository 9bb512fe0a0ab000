//! Tests of GPU lanes.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use onehop_usrbio::ring::{Client, Request};
use serde_json::json;

use super::*;
use crate::io::tests::{GATED, INODE, Rig, request};
use crate::workers::ServedRing;

const LONG: Duration = Duration::from_secs(20);

/// Records whether its copies are waited for.
struct Watched {
    copier: Box<dyn Copier>,
    waited: Arc<AtomicBool>,
}

impl Copier for Watched {
    fn copy(&mut self, rows: &Rows) -> onehop_gpu::Result<()> {
        self.copier.copy(rows)
    }
    fn mark(&mut self) -> onehop_gpu::Result<Mark> {
        self.copier.mark()
    }
    fn is_over(&mut self, mark: Mark) -> onehop_gpu::Result<bool> {
        self.copier.is_over(mark)
    }
    fn wait(&mut self, mark: Mark) -> onehop_gpu::Result<()> {
        self.waited.store(true, Ordering::Release);
        self.copier.wait(mark)
    }
}

/// Wraps the lane's last copier in [`Watched`].
fn watch(lane: &mut GpuCopyLane) -> Arc<AtomicBool> {
    let waited = Arc::new(AtomicBool::new(false));
    let BufferCopier { buffer, copier, .. } = lane.copiers.pop().unwrap();
    let copier = Box::new(Watched { copier, waited: waited.clone() });
    lane.copiers.push(BufferCopier { buffer, reads: true, copier });
    waited
}

/// Lanes without threads, whose buffer the rig has: the test runs the lane.
fn lane_of(rig: &Rig) -> (Arc<GpuLanes>, GpuCopyLane) {
    lane_of_queue(rig, Queue::default())
}

fn lane_of_queue(rig: &Rig, queue: Queue<QueuedTransfers, LaneUser>) -> (Arc<GpuLanes>, GpuCopyLane) {
    let mut idle = None;
    let without_lanes = |own: Arc<GpuLanes>| {
        let device = own.device.clone();
        // More lanes than allowed, so that none is started.
        let (starter, lanes, threads) =
            (rig.shared.starter.clone(), AtomicUsize::new(usize::MAX), Mutex::default());
        let rings = Mutex::default();
        idle.insert(Arc::new(GpuLanes { starter, device, queue, lanes, most: 0, rings, threads })).clone()
    };
    rig.shared.table.remove(&rig.shared.table.get(rig.gpu).unwrap());
    rig.add_gpu(without_lanes);
    let engine = idle.unwrap();
    let lane = GpuCopyLane::new(engine.device.clone(), new_rings(&engine.device, 1).unwrap());
    (engine, lane)
}

/// Begins a request, and returns its only chunk.
fn chunks_of(
    rig: &Rig,
    engine: &GpuLanes,
    (client, ring): (&Client, &Arc<ServedRing>),
    req: &Request,
) -> ChunkBundle {
    assert!(rig.begin(client, ring, req).is_none(), "it was done at once");
    match engine.queue.next(Duration::ZERO) {
        Next::Work(chunks, _) => chunks,
        _ => panic!("the engine has nothing to do"),
    }
}

#[test]
fn a_completion_waits_for_the_copy_into_its_own_buffer() {
    let rig = Rig::new();
    let (engine, mut lane) = lane_of(&rig);
    let (client, ring) = Rig::ring(1000, true);
    let req = request(rig.gpu, 0, 0, 4096);
    let chunk = || chunks_of(&rig, &engine, (&client, &ring), &req);
    lane.transfer(chunk(), &engine);
    let of_old = watch(&mut lane);
    // While that copy is in flight, the program unregisters the buffer, and another buffer gets its ID.
    rig.shared.table.remove(&rig.shared.table.get(rig.gpu).unwrap());
    rig.add_gpu(|_| engine.clone());
    lane.transfer(chunk(), &engine);
    assert!(of_old.swap(false, Ordering::AcqRel), "the first one's copy was waited for");
    let of_new = watch(&mut lane);
    let mut done = Vec::new();
    assert_eq!(client.take(&mut done, 4).unwrap(), 1, "one of two is done");
    lane.settle();
    let waited = (of_old.load(Ordering::Acquire), of_new.load(Ordering::Acquire));
    assert_eq!(waited, (false, true), "the copy into the new buffer is the one to wait for");
    assert_eq!(client.take(&mut done, 4).unwrap(), 1);
    assert!(done.iter().all(|one| one.result == 4096));
}

/// Reports each wait, and blocks it until the test continues.
struct BlockingCopier {
    copier: Box<dyn Copier>,
    waits: Sender<()>,
    go_on: Receiver<()>,
}

impl Copier for BlockingCopier {
    fn copy(&mut self, rows: &Rows) -> onehop_gpu::Result<()> {
        self.copier.copy(rows)
    }
    fn mark(&mut self) -> onehop_gpu::Result<Mark> {
        self.copier.mark()
    }
    fn is_over(&mut self, mark: Mark) -> onehop_gpu::Result<bool> {
        self.copier.is_over(mark)
    }
    fn wait(&mut self, mark: Mark) -> onehop_gpu::Result<()> {
        let _ = self.waits.send(());
        let _ = self.go_on.recv_timeout(LONG);
        self.copier.wait(mark)
    }
}

#[test]
fn a_lane_that_ends_leaves_no_work_behind() {
    let rig = Rig::new();
    // One user may have one of two threads.
    let (engine, mut lane) = lane_of_queue(&rig, Queue::with_threads(2));
    let buffer = rig.shared.table.get(rig.gpu).unwrap();
    let LinkContent::Gpu(gpu) = &buffer.what else { panic!("not GPU memory") };
    let copier = engine.device.gpu().copier(&lane.ring, &gpu.region).unwrap();
    let ((tx, waits), (resume, go_on)) = (channel(), channel());
    let copier = Box::new(BlockingCopier { copier, waits: tx, go_on });
    lane.copiers.push(BufferCopier { buffer: buffer.clone(), reads: true, copier });
    let (client, ring) = Rig::ring(1000, true);
    let req = request(rig.gpu, 0, 0, 4096);
    assert!(rig.begin(&client, &ring, &req).is_none());
    std::thread::scope(|scope| {
        scope.spawn(|| lane.run(&engine));
        waits.recv_timeout(LONG).unwrap();
        assert!(rig.begin(&client, &ring, &req).is_none());
        resume.send(()).unwrap();
        resume.send(()).unwrap();
    });
    let mut done = Vec::new();
    assert_eq!(client.take(&mut done, 4).unwrap(), 2, "what came while the lane waited is left");
}

#[test]
fn a_completion_does_not_wait_for_another_user_s_file() {
    let rig = Rig::new();
    let gate = rig.gated();
    let (engine, mut lane) = lane_of(&rig);
    let rings = [(1000, INODE), (0, GATED)].map(|(uid, inode)| {
        let (client, ring) = Rig::ring(uid, true);
        let req = Request { inode, ..request(rig.gpu, 0, 0, 4096) };
        let chunk = chunks_of(&rig, &engine, (&client, &ring), &req);
        (client, chunk)
    });
    let [(client, first), (_other, second)] = rings;
    lane.transfer(first, &engine);
    std::thread::scope(|scope| {
        scope.spawn(|| lane.transfer(second, &engine));
        let (mut done, start) = (Vec::new(), Instant::now());
        while client.take(&mut done, 4).unwrap() == 0 && start.elapsed() < LONG {
            client.wait(Duration::from_millis(1));
        }
        gate.open.store(true, Ordering::Release);
        assert_eq!(done.len(), 1, "it waits for the other's file");
    });
}

/// Does not report whether its copies have ended, until the test allows it.
struct Silent(Box<dyn Copier>, Arc<AtomicBool>);

impl Copier for Silent {
    fn copy(&mut self, rows: &Rows) -> onehop_gpu::Result<()> {
        self.0.copy(rows)
    }
    fn mark(&mut self) -> onehop_gpu::Result<Mark> {
        self.0.mark()
    }
    fn is_over(&mut self, mark: Mark) -> onehop_gpu::Result<bool> {
        self.wait(mark).map(|()| true)
    }
    fn wait(&mut self, mark: Mark) -> onehop_gpu::Result<()> {
        if self.1.load(Ordering::Acquire) {
            return self.0.wait(mark);
        }
        Err(onehop_gpu::Error::Silent { what: "a copy".into(), seconds: 0 })
    }
}

#[test]
fn a_ring_that_a_copy_may_still_read_is_not_filled_again() {
    let rig = Rig::new();
    let (engine, mut lane) = lane_of(&rig);
    let (client, ring) = Rig::ring(1000, true);
    let req = request(rig.gpu, 0, 0, 4096);
    let chunk = || chunks_of(&rig, &engine, (&client, &ring), &req);
    lane.transfer(chunk(), &engine);
    let BufferCopier { buffer, copier, .. } = lane.copiers.pop().unwrap();
    lane.copiers.push(BufferCopier { buffer, reads: true, copier: Box::new(Silent(copier, Arc::default())) });
    lane.settle();
    let mut done = Vec::new();
    assert_eq!(client.take(&mut done, 4).unwrap(), 1);
    assert!(done[0].result < 0, "it was reported as done");
    let report = rig.shared.stats.document(None);
    assert_eq!((&report["routes"], &report["failed"]), (&json!([]), &json!(1)), "bytes that failed count");
    // Use every slot once more.
    let old = lane.ring.host().unwrap().clone();
    old.fill(0, old.len(), 0xee).unwrap();
    for _ in 0..SLOTS {
        lane.transfer(chunk(), &engine);
    }
    lane.settle();
    let mut bytes = vec![0; old.len()];
    old.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0xee), "the ring was filled under a copy");
    done.clear();
    assert_eq!(client.take(&mut done, 4).unwrap(), SLOTS);
    assert!(done.iter().all(|one| one.result == 4096));
    let route = &rig.shared.stats.document(None)["routes"][0];
    assert_eq!((&route["transfers"], &route["bytes"]), (&json!(SLOTS), &json!(SLOTS * 4096)));
}

#[test]
fn a_gpu_that_never_answers_gets_a_bounded_number_of_rings() {
    let rig = Rig::new();
    let (engine, mut lane) = lane_of(&rig);
    let (client, ring) = Rig::ring(1000, true);
    let req = request(rig.gpu, 0, 0, 4096);
    let has_ended = Arc::new(AtomicBool::new(false));
    // Transfers one chunk, whose copier does not answer, and returns its result.
    let result = |lane: &mut GpuCopyLane| {
        lane.transfer(chunks_of(&rig, &engine, (&client, &ring), &req), &engine);
        if let Some(BufferCopier { buffer, reads: true, copier }) = lane.copiers.pop() {
            let copier = Box::new(Silent(copier, has_ended.clone()));
            lane.copiers.push(BufferCopier { buffer, reads: true, copier });
        }
        lane.settle();
        let mut done = Vec::new();
        assert_eq!(client.take(&mut done, 4).unwrap(), 1);
        done[0].result
    };
    for _ in 0..=MAX_ORPHANED_RINGS {
        assert_eq!(result(&mut lane), -i64::from(Errno::IO.raw_os_error()));
    }
    let last = lane.ring.addr();
    for _ in 0..100 {
        assert_eq!(result(&mut lane), -i64::from(Errno::BUSY.raw_os_error()));
    }
    assert_eq!((lane.orphaned.len(), lane.ring.addr()), (MAX_ORPHANED_RINGS, last), "a ring was renewed");
    has_ended.store(true, Ordering::Release);
    assert_eq!(result(&mut lane), 4096);
    // The ring that went stale last is kept until the next chunk.
    assert_eq!(result(&mut lane), 4096);
    assert!(lane.orphaned.is_empty(), "copies that ended keep their rings");
}

#[test]
fn a_burst_starts_no_more_lanes_than_its_user_may_have() {
    const MOST: usize = 3;
    let rig = Rig::new();
    let mut made = None;
    rig.shared.table.remove(&rig.shared.table.get(rig.gpu).unwrap());
    rig.add_gpu(|own| {
        let lanes = GpuLanes::new(&rig.shared.starter, own.device.clone(), MOST).unwrap();
        made.insert(lanes).clone()
    });
    let lanes = made.unwrap();
    let (client, ring) = Rig::ring_of(1000, true, 64);
    let mut done = Vec::new();
    for _ in 0..20 {
        for _ in 0..32 {
            assert!(rig.begin(&client, &ring, &request(rig.gpu, 0, 0, 4096)).is_none());
            let started = lanes.lanes.load(Ordering::SeqCst);
            assert!(started <= MOST, "{started} lanes");
        }
        let begun = Instant::now();
        while done.len() < 32 && begun.elapsed() < LONG {
            client.wait(Duration::from_millis(1));
            client.take(&mut done, 32).unwrap();
        }
        assert_eq!(done.drain(..).map(|one| one.result).collect::<Vec<_>>(), [4096; 32]);
    }
    lanes.end();
}
