//! Untrusted registers and events of a board, and its ring of bus addresses. Nothing panics or hangs, and no buffer
//! outside of the ring is lent out.
#![no_main]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_gpu::{Emulated, Gpu};
use onehop_os::{BusRange, ControllerBackend, DmaMemory, HostMem, Interrupt, Mapped, Mapper, Registers};
use onehop_proto::BusAddr;
use onehop_radio::{BoardLimits, Format, RingAddresses, Shape, regs};
use onehop_sdr::{Card, Profile, Receiver, RxOptions, SampleRoute, Session, Transmitter, TxOptions};

#[derive(Arbitrary, Debug)]
struct Input {
    ci12: bool,
    pinned: bool,
    runs: Vec<(u64, u32)>,
    lost: u32,
    late: u32,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// An event where the driver looks next, or anywhere.
    Tell {
        at: Option<u8>,
        words: [u32; 4],
    },
    Acquire,
    Stop,
    Start,
    Submit {
        samples: u32,
        time: Option<u64>,
    },
}

/// A board that only replays input.
struct Stranger {
    lost: u32,
    late: u32,
    page: Mutex<Option<HostMem>>,
    next: AtomicU32,
}

impl Registers for Stranger {
    fn read32(&self, offset: u32) -> u32 {
        match offset / 4 {
            regs::RX_LOST => self.lost,
            regs::TX_LATE => self.late.swap_bytes(),
            _ => 0,
        }
    }
    fn write32(&self, offset: u32, _: u32) {
        if offset / 4 == regs::NOTIFY_PAGE {
            self.next.store(0, Ordering::Relaxed);
        }
    }
    fn size(&self) -> u32 {
        regs::BAR_BYTES
    }
}

impl Interrupt for Stranger {
    fn wait(&self, _: Duration) -> bool {
        true
    }
}

impl Mapper for Stranger {
    fn name(&self) -> &str {
        "the stranger's"
    }
    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        let memory = HostMem::anonymous(bytes)?;
        // The first request is for the event page.
        self.page.lock().unwrap().get_or_insert_with(|| memory.clone());
        Ok(memory)
    }
    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let run = BusRange { addr: BusAddr(0x1000_0000), len: memory.bytes() as u64 };
        Ok(Mapped::new(vec![run], Box::new(())))
    }
}

impl Stranger {
    fn tell(&self, at: Option<u8>, words: [u32; 4]) {
        let page = self.page.lock().unwrap().clone().unwrap();
        let next = self.next.fetch_add(u32::from(at.is_none()), Ordering::Relaxed);
        let slot = at.map_or(next % 256, u32::from) as usize * 16;
        let first = if at.is_some() { words[0] } else { words[0] & 0x7fff_ffff | (next / 256 & 1) << 31 };
        for (i, word) in [first, words[1], words[2], words[3]].into_iter().enumerate() {
            page.word(slot + i * 4).unwrap().store(word, Ordering::Relaxed);
        }
    }
}

fuzz_target!(|input: Input| {
    let limits = BoardLimits::USDR_RX;
    let format = if input.ci12 { Format::Ci12 } else { Format::Ci16 };
    let shape = Shape { format, burst_samples: 256, bursts: 4 };
    let runs = input.runs.iter().map(|(addr, len)| (*addr, u64::from(*len)));
    if let Ok(RingAddresses(addresses)) = RingAddresses::plan(&shape, &limits, runs) {
        assert!(
            addresses.iter().all(|addr| addr.checked_add(shape.bytes() - 1).is_some() && addr % 4096 == 0)
        );
    }
    let (page, next) = Default::default();
    let stranger = Arc::new(Stranger { lost: input.lost, late: input.late, page, next });
    let port = ControllerBackend {
        regs: stranger.clone(),
        mapper: stranger.clone(),
        reset: None,
        name: "x".into(),
        simulated: true,
    };
    let Ok(session) = Session::open(Card::new(&port, stranger.clone(), Profile::SIMULATED)) else { return };
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let only = Some(if input.pinned { SampleRoute::Pinned } else { SampleRoute::Direct });
    let mut receiver = Receiver::open(&session, &gpu, &RxOptions { shape, only, self_test: None }).unwrap();
    let options = TxOptions { bytes: 4096, only: Some(SampleRoute::Pinned), self_test: Duration::ZERO };
    let mut transmitter = Transmitter::open(&session, &gpu, &options).unwrap();
    let _ = receiver.start();
    for step in input.steps.into_iter().take(600) {
        match step {
            Step::Tell { at, words } => stranger.tell(at, words),
            Step::Acquire => {
                if let Ok(Some(block)) = receiver.acquire(Duration::ZERO) {
                    assert_eq!(block.memory().len(), shape.bytes() as usize);
                    let parts = block.parts().unwrap();
                    let there: usize = parts.iter().map(|(memory, _)| memory.len()).sum();
                    let samples = (there / format.bytes() as usize) as u64;
                    assert_eq!(samples + block.missing, u64::from(shape.samples()));
                }
            }
            Step::Stop => drop(receiver.stop()),
            Step::Start => drop(receiver.start()),
            Step::Submit { samples, time } => {
                if let Ok(Some(block)) = transmitter.acquire(Duration::ZERO) {
                    let _ = block.submit(samples, time);
                }
                let _ = transmitter.drain(Duration::ZERO);
            }
        }
    }
});
