//! Model files, and plans and engines that load their tensors into GPU memory.
//!
//! 1. [`Model::open`] reads and checks the headers of safetensors and GGUF files.
//! 2. [`Plan::new`] decides where every tensor of a [`Selection`] lies in one arena, and which blocks of which files
//!    are read for it.
//! 3. [`Prepared::new`](engine::Prepared::new) chooses paths and allocates a ring of pinned memory.
//! 4. [`RingEngine::start`](engine::RingEngine::start) loads through that ring; other routes have an
//!    [`Engine`](stream::Engine) of their own.
//! 5. [`Stream::next`](stream::Stream::next) returns each tensor as soon as it is complete.
//!
//! ```no_run
//! use onehop_load::engine::{self, Prepared, RingEngine};
//! use onehop_load::{Local, Model, Plan, Selection, plan, stream::Stream};
//!
//! # fn load(gpu: &dyn onehop_gpu::Gpu) -> Result<(), onehop_load::Error> {
//! let model = Model::open(&Local, &["model.safetensors".into()])?;
//! let plan = Plan::new(&model, &Selection::default(), plan::PlanOptions::ring())?;
//! let prepared = Prepared::new(&plan, &model.files, &engine::Options::default())?;
//! let engine = RingEngine::start(gpu, &plan, prepared)?;
//! let mut stream = Stream::new(plan, engine);
//! while let Some(loaded) = stream.next()? {
//!     println!("{} at {}", loaded.tensor.name, loaded.tensor.at);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! This crate opens no GPU: the caller passes one.
#![forbid(unsafe_code)]

mod arrivals;
pub mod check;
mod dtype;
pub mod engine;
mod error;
pub mod formats;
pub mod group;
mod identity;
mod json;
pub mod landing;
mod local;
pub mod manifest;
pub mod model;
mod names;
mod on_drive;
pub mod outcome;
pub mod plan;
#[cfg(feature = "remote")]
pub mod remote;
mod select;
mod source;
pub mod stream;

pub use arrivals::Arrivals;
pub use dtype::{Dtype, UnknownDtype};
pub use error::{Error, Result};
pub use formats::TensorInfo;
pub use identity::{Change, Identity};
pub use local::{Local, LocalFile};
pub use manifest::Manifest;
pub use model::Model;
pub use on_drive::{OnMaps, OnVolume};
pub use plan::Plan;
pub use select::{Part, Selection, Selector, Use};
pub use source::{Fetch, Kind, Source, Store};
