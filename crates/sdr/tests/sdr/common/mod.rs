//! A simulated board and a GPU: the emulated one, or with `ONEHOP_TEST_GPU=0` the CUDA GPU with that ordinal.

use std::sync::Arc;
use std::time::Duration;

use onehop_board::{Board, BoardConfig};
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu};
use onehop_radio::{Format, Shape};
use onehop_sdr::{Card, Profile, Receiver, RxOptions, Session};

/// Generous limit, for busy machines.
pub const LONG: Duration = Duration::from_secs(20);

pub struct Bench {
    pub session: Arc<Session>,
    pub gpu: Arc<dyn Gpu>,
    pub board: Board,
}

pub fn gpu() -> Arc<dyn Gpu> {
    match std::env::var("ONEHOP_TEST_GPU") {
        Ok(name) => Arc::new(Cuda::load().unwrap().open(&name).unwrap()),
        Err(_) => Arc::new(Emulated::new()),
    }
}

pub fn bench(options: &str) -> Bench {
    bench_with(options, |profile| profile)
}

/// A board driven with a changed profile.
pub fn bench_with(options: &str, change: impl Fn(Profile) -> Profile) -> Bench {
    let board = Board::new(BoardConfig::parse(options).unwrap()).unwrap();
    let card = Card::new(&board.port(), board.interrupt(), change(profile(&board)));
    Bench { session: Session::open(card).unwrap(), gpu: gpu(), board }
}

pub fn profile(board: &Board) -> Profile {
    Profile {
        rx: board.limits(),
        tx: board.tx_limits(),
        reports_time: board.config().reports_time,
        ..Profile::SIMULATED
    }
}

impl Bench {
    pub fn shape(&self, format: Format, bytes: u32) -> Shape {
        Shape::of_bytes(format, &self.board.limits(), bytes).unwrap()
    }

    pub fn receiver(&self, options: &RxOptions) -> onehop_sdr::Result<Receiver> {
        Receiver::open(&self.session, &self.gpu, options)
    }

    /// Asserts that the driver broke no rule of the board.
    pub fn assert_no_violations(&self) {
        assert_eq!(self.board.violations(), []);
    }
}
