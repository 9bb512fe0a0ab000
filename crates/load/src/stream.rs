//! Returns tensors as soon as their bytes have arrived.
//!
//! [`Stream`] tracks tensors, an [`Engine`] moves the bytes. A [`StreamedTensor`] borrows the stream, so it cannot
//! outlive its memory, and the engine cannot be used while its memory is being read.

use std::collections::VecDeque;

use crate::arrivals::Arrivals;
use crate::plan::{Chunk, Placed, Plan};

/// Moves the chunks of a plan into an arena: one implementation per kind of route.
pub trait Engine {
    /// The arena.
    type Arena;
    /// Its errors.
    type Error: From<crate::Error>;

    /// Waits for the next chunk whose bytes are all in the arena; `None` after the last. Chunks arrive in any order,
    /// each once.
    ///
    /// # Errors
    /// When bytes could not be moved. The load has then failed.
    fn arrived(&mut self) -> Result<Option<Chunk>, Self::Error>;

    /// The arena, of which only arrived parts may be read.
    fn arena(&self) -> &Self::Arena;

    /// Ends operations in progress, and returns the arena.
    ///
    /// # Errors
    /// When an operation in progress cannot be ended.
    fn finish(self) -> Result<Self::Arena, Self::Error>;
}

/// A load that returns tensors while it runs. Dropping it cancels the load.
pub struct Stream<E> {
    plan: Plan,
    engine: E,
    arrivals: Arrivals,
    ready: VecDeque<usize>,
}

/// A complete tensor, valid until the stream is advanced.
#[derive(Debug)]
pub struct StreamedTensor<'s, A> {
    /// The tensor, and its place in the arena.
    pub tensor: &'s Placed,
    /// The memory that contains it.
    pub arena: &'s A,
}

impl<E: Engine> Stream<E> {
    /// Wraps an engine that loads `plan`.
    pub fn new(plan: Plan, engine: E) -> Self {
        let (arrivals, complete) = Arrivals::new(&plan);
        Self { plan, engine, arrivals, ready: complete.into() }
    }

    /// The next complete tensor; `None` after the last.
    ///
    /// # Errors
    /// When the engine fails, or ends before the plan is complete.
    #[expect(clippy::should_implement_trait, reason = "an Iterator's items cannot borrow from it")]
    pub fn next(&mut self) -> Result<Option<StreamedTensor<'_, E::Arena>>, E::Error> {
        while self.ready.is_empty() && !self.arrivals.done() {
            let chunk = self.engine.arrived()?.ok_or(crate::Error::Incomplete)?;
            self.ready.extend(self.arrivals.arrive(&chunk).map_err(crate::Error::from)?);
        }
        let next = self.ready.pop_front();
        let tensor = next.and_then(|i| self.plan.tensors.get(i));
        Ok(tensor.map(|tensor| StreamedTensor { tensor, arena: self.engine.arena() }))
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The engine.
    pub fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of tensors that have arrived.
    pub fn bytes(&self) -> u64 {
        self.arrivals.bytes()
    }

    /// Waits for the rest, and returns the arena with the plan that locates the tensors in it.
    ///
    /// # Errors
    /// As for [`Stream::next`].
    pub fn finish(mut self) -> Result<(Plan, E::Arena), E::Error> {
        while self.next()?.is_some() {}
        Ok((self.plan, self.engine.finish()?))
    }
}
