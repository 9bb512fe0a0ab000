//! The step that runs only on request: the GPU reads the drive's registers.

use std::time::Instant;

use onehop_drive::Error;
use onehop_proto::regs::{Cap, offset};

use super::steps::{CheckSetup, StepResult, StepState};
use crate::error::Result;

pub(super) const ID: &str = "gpu-reads";
pub(super) const WHAT: &str = "the GPU reads the drive's registers (BAR0)";
pub(super) const NOT_REQUESTED: &str = "not tried (only with --gpu-reads-registers); no route needs it, and if such reads are lost, they may \
                                        take the drive's link down until a power cycle";
const NO_MEMORY: &str =
    "not tried: this GPU cannot read these registers as memory; a CPU thread relays its doorbell writes";

/// The registers that are read: consecutive words that never change and are never all ones.
const WORDS: [&str; 3] = ["CAP", "the upper half of CAP", "VS"];

/// The result, the reason, and whether wrong bytes were read.
type PeekResult = (StepState, String, bool);

impl CheckSetup {
    /// Lets the GPU read the registers, compares them with what the CPU reads, and checks that the drive still answers.
    pub(super) fn gpu_reads(&self) -> StepResult {
        let start = Instant::now();
        let (state, mut why, wrong_bytes) =
            self.peek().unwrap_or_else(|error| (StepState::No, error.to_string(), false));
        if state != StepState::Yes && self.gone().is_some() {
            why.push_str("; the CPU now also reads all ones: the drive is gone");
        }
        StepResult { id: ID, what: WHAT, state, why, took: start.elapsed(), wrong_bytes }
    }

    fn peek(&self) -> Result<PeekResult> {
        if let Some(error) = self.gone() {
            return Err(error.into());
        }
        let regs = &self.port.regs;
        let doorbells = self.gpu.map_registers(regs.clone())?;
        if doorbells.is_relayed() {
            return Ok((StepState::Untested, NO_MEMORY.to_owned(), false));
        }
        let expected = [0, 4, 8].map(|at| regs.read32(offset::CAP + at));
        let seen = self.gpu.instruments()?.peek(&doorbells, offset::CAP, WORDS.len() as u32, self.timeout)?;
        Ok(judge(expected, &seen))
    }

    /// The error if the drive no longer answers the CPU.
    pub(crate) fn gone(&self) -> Option<Error> {
        let gone = || Error::Gone { drive: self.port.name.clone(), register: "CAP" };
        Cap(self.port.regs.read64(offset::CAP)).gone().then(gone)
    }
}

/// Compares the words that the GPU read with those that the CPU reads.
fn judge(expected: [u32; 3], seen: &[u32]) -> PeekResult {
    for ((name, expected), seen) in WORDS.iter().zip(expected).zip(seen) {
        if *seen == u32::MAX {
            let why = format!(
                "all ones for {name}, where the CPU reads {expected:#010x}: the path to the drive loses such reads"
            );
            return (StepState::No, why, false);
        }
        if *seen != expected {
            return (
                StepState::No,
                format!("{seen:#010x} for {name}, where the CPU reads {expected:#010x}"),
                true,
            );
        }
    }
    if seen.len() < expected.len() {
        let why = format!("time limit reached after {} of {} registers", seen.len(), expected.len());
        return (StepState::No, why, false);
    }
    let [low, high, version] = expected;
    (
        StepState::Yes,
        format!("CAP {high:#010x}'{low:08x} and VS {version:#010x}, as the CPU reads them"),
        false,
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use onehop_gpu::Emulated;
    use onehop_os::Registers;

    use super::*;
    use crate::stop::StopFlag;

    #[test]
    fn only_values_that_the_cpu_also_reads_pass() {
        let expected = [0x1ff, 0x20, 0x10400];
        let judged = |seen: &[u32]| judge(expected, seen);
        assert_eq!(judged(&expected).0, StepState::Yes);
        for (seen, words, wrong) in [
            (&[u32::MAX][..], "all ones for CAP,", false),
            (&[0x1ff, u32::MAX], "all ones for the upper half", false),
            (&[0x1ff, 0x20], "after 2 of 3", false),
            (&[], "after 0 of 3", false),
            (&[0x1ff, 0x20, 0], "0x00000000 for VS, where the CPU reads 0x00010400", true),
        ] {
            let (state, why, wrong_bytes) = judged(seen);
            assert!(
                state == StepState::No && why.contains(words) && wrong_bytes == wrong,
                "{seen:x?}: {why}"
            );
        }
    }

    /// Registers that read as all ones for GPU threads, and if `breaks`, afterwards for the CPU too.
    struct Lossy {
        regs: Arc<dyn Registers>,
        breaks: bool,
        broken: AtomicBool,
    }

    impl Registers for Lossy {
        fn read32(&self, offset: u32) -> u32 {
            let by_gpu = std::thread::current().name() == Some("emulated gpu");
            self.broken.fetch_or(by_gpu && self.breaks, Ordering::AcqRel);
            let lost = by_gpu || self.broken.load(Ordering::Acquire);
            if lost { u32::MAX } else { self.regs.read32(offset) }
        }
        fn write32(&self, offset: u32, value: u32) {
            self.regs.write32(offset, value);
        }
        fn size(&self) -> u32 {
            self.regs.size()
        }
    }

    #[test]
    fn lost_reads_are_reported_and_end_the_check() {
        for (reads, breaks) in [(false, true), (true, false), (true, true)] {
            let sim = onehop_sim::open("mem:8M").unwrap();
            let mut port = sim.port();
            port.regs = Arc::new(Lossy { regs: port.regs.clone(), breaks, broken: AtomicBool::new(false) });
            let gpu = Arc::new(Emulated::new());
            let mut setup = CheckSetup::new(port, gpu, (1, 0), Duration::from_secs(5), reads);
            let rows = setup.run(&StopFlag::default()).unwrap();
            let (last, others) = rows.split_last().unwrap();
            assert!(
                others.iter().all(|row| row.state == StepState::Yes || row.id == "sq-cmb"),
                "{others:#?}"
            );
            assert_eq!(last.state, if reads { StepState::No } else { StepState::Untested });
            assert_eq!(last.why.contains("loses such reads"), reads, "{}", last.why);
            assert_eq!(last.why.contains("drive is gone"), reads && breaks, "{}", last.why);
            assert_eq!(setup.gone().is_some(), reads && breaks);
        }
    }
}
