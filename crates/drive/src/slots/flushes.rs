//! Flushes that were completed beside other commands of their queue.
//!
//! A controller may complete command A under the identifier of flush F. F then seems to have succeeded, and may never
//! be executed. The traces are those of [`crate::doubts`]: A is never completed, or F is completed twice. So F ends
//! only when all commands that were in flight beside it have ended, and it is sent again after a trace. Until then its
//! success does not count for acknowledged writes.

use std::time::Instant;

use onehop_proto::Cqe;

use super::{CommandSlots, Token, is_accounted_for};
use crate::entry::{CommandState, Finished, UnsureFlush};
use crate::{Error, Recovery};

impl CommandSlots {
    /// A flush was completed with success; whether it has to wait for commands beside it.
    pub(super) fn is_unsure(&mut self, id: u32, cqe: &Cqe) -> bool {
        let others = (0..self.depth()).filter(|other| *other != id);
        let concurrent: Vec<_> = others.filter_map(|other| Some((other, self.cid_of(other)?))).collect();
        if concurrent.is_empty() {
            return false;
        }
        let entry = &mut self.entries[id as usize];
        let finished = Finished { result: cqe.result(), retries: entry.tries(), late_data: false };
        entry.state = CommandState::Unsure(Box::new(UnsureFlush { finished, concurrent }));
        self.unsure += 1;
        true
    }

    /// Ends the flushes beside which nothing is in flight any more. An unexpected completion leads to a reset first.
    pub(super) fn settle_flushes(&mut self) {
        for id in 0..self.depth() {
            let CommandState::Unsure(flush) = &mut self.entries[id as usize].state else { continue };
            let mut concurrent = std::mem::take(&mut flush.concurrent);
            concurrent.retain(|(other, cid)| self.cid_of(*other) == Some(*cid));
            let entry = &mut self.entries[id as usize];
            let CommandState::Unsure(flush) = &mut entry.state else { continue };
            if !concurrent.is_empty() || self.unexpected.is_some() {
                flush.concurrent = concurrent;
                continue;
            }
            let finished = flush.finished;
            let is_durable = is_accounted_for(entry, &self.namespaces, &mut self.reported);
            entry.state = if is_durable {
                CommandState::Done(Ok(finished))
            } else {
                CommandState::failed(Error::WritesLost { drive: self.name.clone() })
            };
            self.unsure -= 1;
        }
    }

    /// Sends those flushes again: a command was not completed.
    pub(crate) fn repeat_flushes(&mut self, recovery: Recovery) {
        for id in 0..self.depth() {
            if matches!(self.entries[id as usize].state, CommandState::Unsure(_)) {
                self.unsure -= 1;
                self.lose(id, recovery);
            }
        }
    }

    /// A late command that a flush waits for.
    pub(crate) fn late_concurrent(&self, token: Token) -> Option<Token> {
        let entry = self.entries.get(token.entry as usize).filter(|_| self.knows(token))?;
        let CommandState::Unsure(flush) = &entry.state else { return None };
        let now = Instant::now();
        let is_late = |(other, cid): &&(u32, u16)| {
            self.cid_of(*other) == Some(*cid) && now >= self.entries[*other as usize].deadline
        };
        let (late, _) = flush.concurrent.iter().find(is_late)?;
        Some(Token { queue: self.serial, entry: *late, life: self.entries[*late as usize].life })
    }
}
