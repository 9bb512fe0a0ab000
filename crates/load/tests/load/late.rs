//! Threads that share a copy engine, as on a real GPU. A stand-in copies only when it is polled, so a slot that is
//! reused too early is overwritten, and a chunk that is reported too early is missing.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;

use onehop_gpu::{Copier, Doorbells, Emulated, Gpu, KernelJob, Launch, Mark, Place, Region, Rows, Running};
use onehop_load::engine::{Options, Prepared, RingEngine, Route};
use onehop_load::stream::Stream;
use onehop_load::{Error, Local, Model, Plan, Selection, plan};
use onehop_os::{HostMem, Registers};
use rustix::fs::{Advice, fadvise};

use crate::engine::{Folder, bytes_of, model};

struct LateGpu(Emulated);

impl Gpu for LateGpu {
    fn name(&self) -> &str {
        "late"
    }
    fn simulated(&self) -> bool {
        false
    }
    fn alloc(&self, place: Place, bytes: usize) -> onehop_gpu::Result<Region> {
        self.0.alloc(place, bytes)
    }
    fn adopt(&self, place: Place, mem: HostMem) -> onehop_gpu::Result<Region> {
        self.0.adopt(place, mem)
    }
    fn copier(&self, from: &Region, to: &Region) -> onehop_gpu::Result<Box<dyn Copier>> {
        let copier = self.0.copier(from, to)?;
        Ok(Box::new(LateCopier { copier, begun: Vec::new(), marked: VecDeque::new(), asked: 0 }))
    }
    fn map_registers(&self, regs: Arc<dyn Registers>) -> onehop_gpu::Result<Doorbells> {
        self.0.map_registers(regs)
    }
    fn prepare(&self, launch: &Launch) -> onehop_gpu::Result<()> {
        self.0.prepare(launch)
    }
    fn launch(&self, launch: &Launch, job: &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> {
        self.0.launch(launch, job)
    }
}

struct LateCopier {
    copier: Box<dyn Copier>,
    begun: Vec<Rows>,
    marked: VecDeque<(Mark, Vec<Rows>)>,
    asked: u32,
}

impl Copier for LateCopier {
    fn copy(&mut self, rows: &Rows) -> onehop_gpu::Result<()> {
        self.begun.push(*rows);
        Ok(())
    }
    fn mark(&mut self) -> onehop_gpu::Result<Mark> {
        let mark = self.copier.mark()?;
        self.marked.push_back((mark, std::mem::take(&mut self.begun)));
        Ok(mark)
    }
    fn is_over(&mut self, mark: Mark) -> onehop_gpu::Result<bool> {
        // Occasionally, and no more than one at a time.
        self.asked += 1;
        if self.asked.is_multiple_of(3)
            && let Some((_, all)) = self.marked.pop_front()
        {
            self.copier.copy_all(&all)?;
        }
        Ok(self.marked.front().is_none_or(|(first, _)| *first > mark))
    }
    fn wait(&mut self, mark: Mark) -> onehop_gpu::Result<()> {
        while !self.is_over(mark)? {}
        Ok(())
    }
}

#[test]
fn no_slot_is_filled_before_it_was_copied() {
    let folder = Folder::new("late");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &[3 << 20, 1, 4096, 7 << 20 | 3, 0, 12_345, 9 << 20]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    for route in [Route::Cached, Route::Pinned, Route::Auto] {
        for (threads, slot) in [(1, 65536), (2, 1 << 20), (5, 12_288), (9, 2 << 20), (16, 65536)] {
            if route == Route::Auto {
                // A part for each path.
                let file = File::open(&path).unwrap();
                fadvise(&file, 8 << 20, None, Advice::DontNeed).unwrap();
            }
            let plan = Plan::new(&opened, &Selection::default(), plan::PlanOptions::ring()).unwrap();
            let options = Options { route, threads: Some(threads), slot: Some(slot) };
            let prepared = match Prepared::new(&plan, &opened.files, &options) {
                Err(Error::NotDirect { why, .. }) => {
                    println!("SKIP: {why}");
                    continue;
                }
                other => other.unwrap(),
            };
            let engine = RingEngine::start(&LateGpu(Emulated::new()), &plan, prepared).unwrap();
            let mut stream = Stream::new(plan, engine);
            let mut seen = 0;
            while let Some(streamed) = stream.next().unwrap() {
                let (_, data) = tensors.iter().find(|(name, _)| *name == streamed.tensor.name).unwrap();
                let at = (route, threads, slot, &streamed.tensor.name);
                assert!(
                    bytes_of(streamed.arena, streamed.tensor) == *data,
                    "{at:?} is not there when it is reported"
                );
                seen += 1;
            }
            assert_eq!(seen, tensors.len());
            let (plan, arena) = stream.finish().unwrap();
            for tensor in &plan.tensors {
                let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
                assert!(bytes_of(&arena, tensor) == *data, "{route:?} {threads} {slot} {}", tensor.name);
            }
        }
    }
}
