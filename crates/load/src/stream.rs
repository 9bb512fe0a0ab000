//! Tensors handed out as soon as their bytes are there.
//!
//! [`Stream`] does the account, an [`Engine`] moves the bytes. What is handed out is *lent*: a [`StreamedTensor`] borrows the
//! stream, so it cannot outlive the memory that it lies in, and nothing can be done with the engine while somebody looks
//! at its memory.

use std::collections::VecDeque;

use crate::arrivals::Arrivals;
use crate::plan::{Chunk, Placed, Plan};

/// What moves the chunks of a plan into an arena: one for each kind of route.
pub trait Engine {
    /// The arena.
    type Arena;
    /// What can go wrong.
    type Error: From<crate::Error>;

    /// Waits until one more chunk is in the arena with all of its bytes, and gives it; none when all of them are.
    /// Chunks may come in any order, each once.
    ///
    /// # Errors
    /// When bytes could not be moved. The load is over then.
    fn arrived(&mut self) -> Result<Option<Chunk>, Self::Error>;

    /// The arena, of which those parts may be looked at that have arrived.
    fn arena(&self) -> &Self::Arena;

    /// Ends what is under way, and gives the arena away.
    ///
    /// # Errors
    /// When something that is under way cannot be ended.
    fn finish(self) -> Result<Self::Arena, Self::Error>;
}

/// A load that hands out tensors while it goes on. Dropping it cancels the load: the engine ends what is under way.
pub struct Stream<E> {
    plan: Plan,
    engine: E,
    arrivals: Arrivals,
    ready: VecDeque<usize>,
}

/// A tensor whose bytes are all there, for as long as the stream is not asked for the next.
#[derive(Debug)]
pub struct StreamedTensor<'s, A> {
    /// What it is, and where in the arena.
    pub tensor: &'s Placed,
    /// The memory that it lies in.
    pub arena: &'s A,
}

impl<E: Engine> Stream<E> {
    /// Over an engine that works on `plan`.
    pub fn new(plan: Plan, engine: E) -> Self {
        let (arrivals, complete) = Arrivals::new(&plan);
        Self { plan, engine, arrivals, ready: complete.into() }
    }

    /// The next tensor that is complete; none when all have been handed out.
    ///
    /// # Errors
    /// When the engine fails, or is at its end before the plan is.
    #[expect(clippy::should_implement_trait, reason = "an Iterator cannot lend")]
    pub fn next(&mut self) -> Result<Option<StreamedTensor<'_, E::Arena>>, E::Error> {
        while self.ready.is_empty() && !self.arrivals.done() {
            let chunk = self.engine.arrived()?.ok_or(crate::Error::Incomplete)?;
            self.ready.extend(self.arrivals.arrive(&chunk).map_err(crate::Error::from)?);
        }
        let next = self.ready.pop_front();
        let tensor = next.and_then(|i| self.plan.tensors.get(i));
        Ok(tensor.map(|tensor| StreamedTensor { tensor, arena: self.engine.arena() }))
    }

    /// What moves the bytes.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// What is loaded.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of tensors that have arrived so far.
    pub fn bytes(&self) -> u64 {
        self.arrivals.bytes()
    }

    /// Waits for what is still to come, and gives the arena away with the plan that tells where the tensors are.
    ///
    /// # Errors
    /// As for [`Stream::next`].
    pub fn finish(mut self) -> Result<(Plan, E::Arena), E::Error> {
        while self.next()?.is_some() {}
        Ok((self.plan, self.engine.finish()?))
    }
}
