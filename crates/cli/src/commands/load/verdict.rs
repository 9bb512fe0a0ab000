//! Whether the bytes in GPU memory are right.

use std::collections::HashMap;
use std::path::Path;

use onehop_load::check::{self, Compared};
use onehop_load::{Manifest, Model};

use super::LoadedShare;
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::outputs;

/// Compares every GPU's memory with the files once more. The outer error says that this was not possible, the inner one
/// that bytes differ.
pub(super) fn compare(model: &Model, held: &[LoadedShare], context: &CommandContext) -> Result<Result<()>> {
    let go_on = || context.stop.check().is_ok();
    for LoadedShare { share, arena, .. } in held {
        if let Some(at) = check::compare(&share.plan, &model.files, arena, &go_on)? {
            let place = format!("byte {} of the arena on, in {}", at.at, at.tensor);
            let gpu = share.gpu.gpu.name();
            let why = format!("the memory of GPU {gpu} and the file differ from {place}");
            return Ok(Err(CliError::Mismatch(why)));
        }
    }
    Ok(Ok(()))
}

/// Compares GPU memory with the manifest, which has whole tensors only.
pub(super) fn against(
    (path, manifest): &(&Path, Manifest),
    model: &Model,
    held: &[LoadedShare],
) -> Result<Compared> {
    let mut all = Compared::default();
    for LoadedShare { share, sums, .. } in held {
        let sums = sums.as_deref().unwrap_or_default();
        let compared = check::against(manifest, model, &share.plan, sums);
        let wrong = |why| CliError::Mismatch(format!("{}: {why}", path.display()));
        all = all.with(compared.map_err(wrong)?);
    }
    Ok(all)
}

/// Writes the checksums of tensors that were compared with their files. All of them are there, and whole.
pub(super) fn write_manifest(path: &Path, model: &Model, held: &[LoadedShare]) -> Result<()> {
    let mut manifest = Manifest::default();
    let infos: HashMap<_, _> = model.tensors.iter().map(|t| (t.info.name.as_str(), &t.info)).collect();
    for LoadedShare { share, sums, .. } in held.iter().take(1) {
        for (placed, sum) in share.plan.tensors.iter().zip(sums.iter().flatten()) {
            if let Some(info) = infos.get(placed.name.as_str()) {
                manifest.add(info, *sum);
            }
        }
    }
    outputs::write(path, manifest.to_json())
}
