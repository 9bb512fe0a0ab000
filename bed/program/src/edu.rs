//! QEMU's `edu`, a device of another kind: 28 bits of address, an engine that copies, one interrupt, and no way of being reset.

use std::time::{Duration, Instant};

use onehop_os::{HostMem, Registers};
use onehop_pci::kmod::{Access, Refusal, Session};
use onehop_pci::{DeviceKind, Error, Root, is_translated};

use crate::report::{Failed, check, ensure, noise};

/// Registers: what is computed, the state, the interrupt that is raised and acknowledged, and the engine's.
const FACTORIAL: u32 = 0x08;
const STATE: u32 = 0x20;
const ACKNOWLEDGE: u32 = 0x64;
const FROM: u32 = 0x80;
const TO: u32 = 0x88;
const COUNT: u32 = 0x90;
const COMMAND: u32 = 0x98;
/// Of the state: an interrupt when the factorial is there. Of the command: go, out of the device, an interrupt at the end.
const RAISE: u32 = 0x80;
const GO: u32 = 1;
const OUT: u32 = 2;
const TELL: u32 = 4;
/// The device's own memory, as its engine addresses it.
const INSIDE: u32 = 0x4_0000;
const PAGE: usize = 4096;
/// So far apart are the pages that are tried.
const STEP: usize = 256 << 10;
const BITS: u32 = 28;
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn run(device: &str) -> Result<(), Failed> {
    let (root, address) = (Root::here(), device.parse()?);
    let drive = Session::take(&root, DeviceKind::Drive, address).err();
    check("edu is not taken for a drive", || {
        let refused = matches!(drive, Some(Error::Refused { .. }));
        ensure(refused, || format!("{drive:?}"))
    });
    let session = Session::take(&root, DeviceKind::Board, address)?;
    check("it cannot be reset, and says so", || {
        let info = session.info()?;
        ensure(!info.can_reset && info.bars[0] == 1 << 20, || format!("{info:?}"))?;
        refused(session.reset(), |refusal| matches!(refusal, Refusal::NoReset))?;
        refused(session.start(session.epoch()?), |refusal| matches!(refusal, Refusal::NoReset))
    });
    session.set_mask(BITS)?;
    let epoch = session.epoch()?;
    // More than lies above what 28 bits reach, in a guest of 1 GiB.
    let memory = HostMem::touched(320 << 20)?;
    let mut within = None;
    check("memory beyond its 28 bits is refused, other memory is not", || {
        let mut beyond = 0;
        for at in (0..memory.len()).step_by(STEP) {
            let page = memory.slice(at..at + PAGE)?;
            match session.map_host(&page, Access::BOTH) {
                Ok(mapping) => {
                    let end = mapping.runs()[0].addr.0 + PAGE as u64;
                    ensure(end <= 1 << BITS, || format!("it got an address that ends at {end:#x}"))?;
                    within = Some((page, mapping));
                }
                Err(Error::Module { refusal: Refusal::Mask { bits: BITS, offset: 0, addr }, .. }) => {
                    ensure(addr + PAGE as u64 > 1 << BITS, || format!("{addr:#x} was refused"))?;
                    beyond += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
        println!("    {beyond} of {} pages lie beyond", memory.len() / STEP);
        let translated = is_translated(&root, address);
        ensure(!translated || beyond == 0, || "an IOMMU gives addresses that it has".into())
    });
    let Some((page, mapping)) = within else {
        println!("SKIP edu: no page lies where it reaches, so its engine cannot be tried");
        return Ok(());
    };
    let registers = session.registers()?;
    let interrupt = session.interrupts(1)?.remove(0);
    session.start_unreset(epoch)?;
    check("its engine reads and writes the page, and raises its interrupt", || {
        let data = noise(28, PAGE / 2);
        page.write(0, &data)?;
        let bus = mapping.runs()[0].addr.0 as u32;
        for (from, to, command) in
            [(bus, INSIDE, GO | TELL), (INSIDE, bus + PAGE as u32 / 2, GO | OUT | TELL)]
        {
            copy(&*registers, from, to, command)?;
            ensure(interrupt.wait(PATIENCE), || "no interrupt came".into())?;
            registers.write32(ACKNOWLEDGE, registers.read32(0x24));
        }
        ensure(page.to_vec(PAGE / 2, PAGE / 2)? == data, || "other bytes came back".into())
    });
    check("an interrupt that is no DMA's", || {
        registers.write32(STATE, RAISE);
        registers.write32(FACTORIAL, 5);
        ensure(interrupt.wait(PATIENCE) && registers.read32(FACTORIAL) == 120, || "none came".into())?;
        registers.write32(ACKNOWLEDGE, registers.read32(0x24));
        Ok(())
    });
    check("what was unmapped is out of its reach", || {
        drop(mapping);
        let info = session.info()?;
        ensure(info.mappings == 0 && info.dma_on, || format!("{info:?}"))?;
        session.stop()?;
        ensure(!session.info()?.dma_on, || "its DMA is still on".into())
    });
    Ok(())
}

fn copy(registers: &dyn Registers, from: u32, to: u32, command: u32) -> Result<(), Failed> {
    registers.write32(FROM, from);
    registers.write32(TO, to);
    registers.write32(COUNT, PAGE as u32 / 2);
    registers.write32(COMMAND, command);
    let begun = Instant::now();
    while registers.read32(COMMAND) & GO != 0 {
        ensure(begun.elapsed() < PATIENCE, || "the engine does not end".into())?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn refused<T>(done: Result<T, Error>, right: impl FnOnce(&Refusal) -> bool) -> Result<(), Failed> {
    match done {
        Err(Error::Module { refusal, .. }) if right(&refusal) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err("it was done".into()),
    }
}
