//! Model files, and the plan that takes their tensors into GPU memory.
//!
//! [`Model::open`] reads the headers of safetensors and GGUF files, believing nothing that they say of themselves
//! before it has been held against the rest. [`Plan::new`] decides where every tensor of a [`Selection`] comes to lie
//! in one arena and which blocks of which files are read for it; [`Plan::chunks`] cuts that to the slots of a ring.
//! Whatever moves the bytes is an [`Engine`](stream::Engine): that of files is [`RingEngine`](engine::RingEngine). [`Arrivals`]
//! and [`Stream`](stream::Stream) hand tensors out as soon as they are complete. Nothing here opens a GPU.
#![forbid(unsafe_code)]

mod arrivals;
pub mod check;
mod dtype;
pub mod engine;
mod error;
pub mod formats;
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
