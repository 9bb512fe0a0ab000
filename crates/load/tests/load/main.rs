//! Formats, models and plans from the outside: oracles, hostile files, and a model of an engine.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;
mod cufile;
mod engine;
mod gguf;
mod gguf_oracle;
mod landing;
mod late;
mod manifest;
mod mishaps;
mod model;
mod mover;
mod plan;
mod ranks;
mod safetensors;
mod segments;
mod several;
