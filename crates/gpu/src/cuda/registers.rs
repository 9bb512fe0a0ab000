//! A device's registers for kernels to write: mapped if they are memory, otherwise forwarded by a thread.

use std::sync::Arc;

use onehop_os::{HostMem, MmioWindow, Registers};
use onehop_proto::GpuAddr;

use super::capabilities::Capabilities;
use super::context::Context;
use super::driver::{DevicePtr, FORKED, Failure};
use super::host::{self, MappingKind};
use super::live::MemoryHold;
use super::surroundings::Surroundings;
use crate::region::AddressSpace;
use crate::relay::{Activity, Relay};
use crate::{Doorbells, Error, Result};

/// Gives the GPU an address for registers, one way or the other.
pub(super) fn map(
    context: &Arc<Context>,
    can: &Capabilities,
    kernels: &Arc<Activity>,
    regs: Arc<dyn Registers>,
) -> Result<Doorbells> {
    match regs.mmio() {
        Some(window) => direct(context, &window, regs),
        None => relayed(context, can, kernels, regs),
    }
}

fn direct(context: &Arc<Context>, window: &MmioWindow, regs: Arc<dyn Registers>) -> Result<Doorbells> {
    let mem = window.memory();
    // The driver only registers pages that are mapped; VFIO maps each on first access.
    for page in (0..mem.len()).step_by(4096) {
        let _ = regs.read32(page as u32);
    }
    match host::register_io(context, mem) {
        Ok((registration, at)) => Ok(doorbells(context, at, mem.len(), Arc::new((registration, regs)))),
        Err(failure) => Err(Error::Registers { why: explain(context, mem, failure) }),
    }
}

fn explain(context: &Context, mem: &HostMem, failure: Option<Failure>) -> String {
    let (said, code) = match failure {
        None => ("a part of its pages is registered already as something else".into(), None),
        Some(Failure::Missing(symbol, since)) => (format!("the driver has no {symbol} (CUDA {since})"), None),
        Some(Failure::Forked) => (FORKED.into(), None),
        Some(Failure::Destroyed) => ("the program has destroyed the context".into(), None),
        Some(Failure::Code(call, code)) => {
            let (name, text) = context.driver.words(code);
            (format!("{call} with IOMEMORY failed with {name} ({code}): {text}"), Some(code))
        }
    };
    let causes = Surroundings::of(mem.host_ptr() as usize).why_no_io_memory(code);
    let mut words = said;
    for (i, cause) in causes.iter().enumerate() {
        words.push_str(&format!(
            "{} ({}) {cause}",
            if i == 0 { ". What may be the cause:" } else { ";" },
            i + 1
        ));
    }
    words
}

fn relayed(
    context: &Arc<Context>,
    can: &Capabilities,
    kernels: &Arc<Activity>,
    regs: Arc<dyn Registers>,
) -> Result<Doorbells> {
    let page = HostMem::touched(regs.size() as usize)?;
    let bytes = page.len();
    let (registration, at) = host::register(context, can, &page, MappingKind::Memory)?;
    let relay = Relay::start(page, regs, kernels.clone())?;
    let watched = relay.watched();
    // The thread ends before the GPU loses the page: tuple fields are dropped in order.
    Ok(doorbells(context, at, bytes, Arc::new((relay, registration))).relayed(watched))
}

/// Registers whose addresses kernels may get.
fn doorbells(context: &Context, at: DevicePtr, bytes: usize, hold: MemoryHold) -> Doorbells {
    let at = GpuAddr(at);
    context.driver.live.add(at, bytes, AddressSpace::Cuda, &hold);
    Doorbells::direct((at, bytes as u64), AddressSpace::Cuda, hold)
}
