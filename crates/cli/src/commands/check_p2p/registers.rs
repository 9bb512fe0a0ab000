//! The step that is tried on request only: the GPU reads the drive's registers.

use std::time::Instant;

use onehop_drive::Error;
use onehop_proto::regs::{Cap, offset};

use super::steps::{CheckSetup, StepResult, StepState};
use crate::error::Result;

pub(super) const ID: &str = "gpu-reads";
pub(super) const WHAT: &str = "the GPU reads the drive's registers (BAR0)";
pub(super) const UNASKED: &str = "not tried (only on request: --gpu-reads-registers); no route needs it, and where such \
                                  reads are lost they may take the drive's link down until a power cycle";
const NO_MEMORY: &str =
    "not tried: this GPU cannot read these registers as memory; a CPU thread passes its doorbells on";

/// What is read: neighbouring words that never change and are never all ones.
const WORDS: [&str; 3] = ["CAP", "the upper half of CAP", "VS"];

/// The result, why, and whether wrong bytes were read.
type PeekResult = (StepState, String, bool);

impl CheckSetup {
    /// Has the GPU read the registers, compares them with what the CPU reads, then checks that the drive still answers.
    pub(super) fn gpu_reads(&self) -> StepResult {
        let begun = Instant::now();
        let (state, mut why, wrong_bytes) =
            self.peek().unwrap_or_else(|error| (StepState::No, error.to_string(), false));
        if state != StepState::Yes && self.gone().is_some() {
            why.push_str("; the CPU now also reads all ones: the drive is gone");
        }
        StepResult { id: ID, what: WHAT, state, why, took: begun.elapsed(), wrong_bytes }
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
        let want = [0, 4, 8].map(|at| regs.read32(offset::CAP + at));
        let seen = self.gpu.peek(&doorbells, offset::CAP, WORDS.len() as u32, self.patience)?;
        Ok(judge(want, &seen))
    }

    /// The error if the drive no longer answers the CPU.
    pub(crate) fn gone(&self) -> Option<Error> {
        let gone = || Error::Gone { drive: self.port.name.clone(), register: "CAP" };
        Cap(self.port.regs.read64(offset::CAP)).gone().then(gone)
    }
}

/// What the words that the GPU read show, compared with those that the CPU reads.
fn judge(want: [u32; 3], seen: &[u32]) -> PeekResult {
    for ((name, want), seen) in WORDS.iter().zip(want).zip(seen) {
        if *seen == u32::MAX {
            let why = format!(
                "all ones for {name}, where the CPU reads {want:#010x}: the path to the drive loses such reads"
            );
            return (StepState::No, why, false);
        }
        if *seen != want {
            return (
                StepState::No,
                format!("{seen:#010x} for {name}, where the CPU reads {want:#010x}"),
                true,
            );
        }
    }
    if seen.len() < want.len() {
        let why = format!("time limit reached after {} of {} registers", seen.len(), want.len());
        return (StepState::No, why, false);
    }
    let [low, high, version] = want;
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
        let want = [0x1ff, 0x20, 0x10400];
        let judged = |seen: &[u32]| judge(want, seen);
        assert_eq!(judged(&want).0, StepState::Yes);
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

    /// Registers that a GPU's threads cannot read; perhaps not even the CPU once a thread has tried.
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
            let mut bench = CheckSetup::new(port, gpu, (1, 0), Duration::from_secs(5), reads);
            let rows = bench.run(&StopFlag::default()).unwrap();
            let (last, others) = rows.split_last().unwrap();
            assert!(
                others.iter().all(|row| row.state == StepState::Yes || row.id == "sq-cmb"),
                "{others:#?}"
            );
            assert_eq!(last.state, if reads { StepState::No } else { StepState::Untested });
            assert_eq!(last.why.contains("loses such reads"), reads, "{}", last.why);
            assert_eq!(last.why.contains("drive is gone"), reads && breaks, "{}", last.why);
            assert_eq!(bench.gone().is_some(), reads && breaks);
        }
    }
}
