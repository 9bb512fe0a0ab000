//! Our readers against mke2fs, debugfs, dosfstools, mtools, exfatprogs, sgdisk, sfdisk and the kernel.
//!
//! Images are random. A failing test prints its seed; `ONEHOP_FILES_SEED` repeats it. `ONEHOP_FILES_LARGE=1` makes more
//! and larger images.

#![allow(clippy::unwrap_used)]

mod exfat;
#[allow(dead_code)]
#[path = "../common/exfat_image.rs"]
mod exfat_image;
mod ext;
mod ext_cases;
mod fat;
mod foreign;
mod kernel;
mod live;
mod members;
#[path = "../common/mounted.rs"]
mod mounted;
mod support;
#[allow(dead_code)]
#[path = "../common/table.rs"]
mod table;
mod tables;
