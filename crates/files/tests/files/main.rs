//! Our readers against mke2fs, debugfs, dosfstools, mtools, exfatprogs, sgdisk, sfdisk and the kernel; extent maps; and
//! damaged volumes.
//!
//! Images are random. A failing test prints its seed; `ONEHOP_FILES_SEED` repeats it. `ONEHOP_FILES_LARGE=1` makes more
//! and larger images.

#![allow(clippy::unwrap_used)]

mod exfat;
#[path = "../common/exfat_image.rs"]
mod exfat_image;
mod ext;
mod ext_cases;
mod fat;
mod foreign;
mod kernel;
mod live;
mod maps;
mod members;
#[path = "../common/mounted.rs"]
mod mounted;
mod mutants;
mod support;
#[path = "../common/table.rs"]
mod table;
mod tables;
#[allow(dead_code, reason = "fuzz targets use the rest")]
#[path = "../common/template.rs"]
mod template;
