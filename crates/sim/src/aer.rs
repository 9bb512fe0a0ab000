//! Asynchronous events: waiting requests and pending events.

use std::collections::VecDeque;

use onehop_proto::Status;
use onehop_proto::log::AsyncEvent;

use crate::device::ControllerState;
use crate::exec::{CommandResult, FetchedCommand};
use crate::violation::Rule;

/// An event without a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AerEvent {
    DoorbellRegister,
    DoorbellValue,
    Temperature,
    NamespaceChanged,
}

impl AerEvent {
    const fn wire(self) -> AsyncEvent {
        match self {
            Self::DoorbellRegister => AsyncEvent::INVALID_DOORBELL_REGISTER,
            Self::DoorbellValue => AsyncEvent::INVALID_DOORBELL_VALUE,
            Self::Temperature => AsyncEvent::TEMPERATURE,
            Self::NamespaceChanged => AsyncEvent::NAMESPACE_CHANGED,
        }
    }
}

/// Requests and events.
#[derive(Default)]
pub(crate) struct Events {
    requests: VecDeque<FetchedCommand>,
    pending: VecDeque<AsyncEvent>,
    /// Log pages whose events were reported, and that the host has not read since.
    masked: Vec<u8>,
}

impl Events {
    /// Removes the request with an identifier.
    pub(crate) fn take_request(&mut self, cid: u16) -> Option<FetchedCommand> {
        let i = self.requests.iter().position(|c| c.sqe.cid() == cid)?;
        self.requests.remove(i)
    }
}

impl ControllerState {
    /// An Asynchronous Event Request: completes now only if it fails.
    pub(crate) fn async_event(&mut self, command: &FetchedCommand) -> Option<CommandResult> {
        if self.events.requests.len() > usize::from(self.config.aerl) {
            let detail = format!("more than {} requests are outstanding", self.config.aerl + 1);
            self.breach(Rule::AerLimit, Some(0), detail);
            return Some(Err(Status::AER_LIMIT_EXCEEDED.with_dnr().into()));
        }
        self.events.requests.push_back(FetchedCommand { sqid: 0, sqe: command.sqe, effects: None });
        self.report_events();
        None
    }

    /// Raises an event.
    pub(crate) fn raise(&mut self, event: AerEvent) {
        let wanted = match event {
            AerEvent::DoorbellRegister | AerEvent::DoorbellValue => true,
            AerEvent::Temperature => self.features.event_config().critical() & 2 != 0,
            AerEvent::NamespaceChanged => self.features.event_config().namespace(),
        };
        let event = event.wire();
        if wanted && !self.events.pending.contains(&event) {
            self.events.pending.push_back(event);
            self.report_events();
        }
    }

    /// Completes requests with the events that are not masked.
    fn report_events(&mut self) {
        while !self.events.requests.is_empty() {
            let masked = &self.events.masked;
            let Some(i) = self.events.pending.iter().position(|e| !masked.contains(&e.page())) else {
                return;
            };
            let (Some(event), Some(request)) =
                (self.events.pending.remove(i), self.events.requests.pop_front())
            else {
                return;
            };
            self.events.masked.push(event.page());
            self.complete(&request, Ok(event.0));
        }
    }

    /// The host has read a log page without RAE, so its event is cleared.
    pub(crate) fn clear_event(&mut self, page: u8) {
        self.events.masked.retain(|p| *p != page);
        self.events.pending.retain(|e| e.page() != page);
        self.report_events();
    }
}
