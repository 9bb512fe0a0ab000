//! Whether the bytes in GPU memory are right.

use std::collections::HashMap;
use std::path::Path;

use onehop_load::check::{self, Compared};
use onehop_load::{Manifest, Model};

use super::LoadedShare;
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::outputs;

/// Compares every GPU's memory with the files. The outer error means that this failed, the inner one that bytes differ.
pub(super) fn compare(model: &Model, loaded: &[LoadedShare], context: &CommandContext) -> Result<Result<()>> {
    let keep_going = || context.stop.check().is_ok();
    for LoadedShare { share, arena, .. } in loaded {
        if let Some(at) = check::compare(&share.plan, &model.files, arena, &keep_going)? {
            let gpu = share.gpu.gpu.name();
            let why = format!(
                "the memory of GPU {gpu} differs from the file, first at byte {} of the arena, in {}",
                at.at, at.tensor
            );
            return Ok(Err(CliError::Mismatch(why)));
        }
    }
    Ok(Ok(()))
}

/// Compares GPU memory with the manifest, which contains only whole tensors.
pub(super) fn compare_with_manifest(
    (path, manifest): &(&Path, Manifest),
    model: &Model,
    loaded: &[LoadedShare],
) -> Result<Compared> {
    let mut all = Compared::default();
    for LoadedShare { share, sums, .. } in loaded {
        let sums = sums.as_deref().unwrap_or_default();
        let compared = check::against(manifest, model, &share.plan, sums);
        let wrong = |why| CliError::Mismatch(format!("{}: {why}", path.display()));
        all = all.with(compared.map_err(wrong)?);
    }
    Ok(all)
}

/// Writes the checksums of all tensors, after they were compared with their files.
pub(super) fn write_manifest(path: &Path, model: &Model, loaded: &[LoadedShare]) -> Result<()> {
    let mut manifest = Manifest::default();
    let infos: HashMap<_, _> = model.tensors.iter().map(|t| (t.info.name.as_str(), &t.info)).collect();
    for LoadedShare { share, sums, .. } in loaded.iter().take(1) {
        for (placed, sum) in share.plan.tensors.iter().zip(sums.iter().flatten()) {
            if let Some(info) = infos.get(placed.name.as_str()) {
                manifest.add(info, *sum);
            }
        }
    }
    outputs::write(path, manifest.to_json())
}
