//! Whether what lies in GPU memory is what it should be.

use std::path::Path;

use onehop_load::{Manifest, Model, check};

use super::Held;
use crate::commands::Context;
use crate::error::{CliError, Result};

/// What was found where it was looked; none where nobody asked.
#[derive(Default)]
pub(super) struct Verdict {
    pub(super) compared: Option<Result<()>>,
    pub(super) manifest: Option<Result<()>>,
}

impl Verdict {
    pub(super) fn verified(&self) -> Option<bool> {
        let asked = self.compared.is_some() || self.manifest.is_some();
        let good = |result: &Option<Result<()>>| result.as_ref().is_none_or(|r| r.is_ok());
        asked.then(|| good(&self.compared) && good(&self.manifest))
    }

    pub(super) fn by(&self) -> Option<&'static str> {
        match (&self.compared, &self.manifest) {
            (Some(_), _) => Some("every byte compared with the files, read once more"),
            (None, Some(_)) => Some("the manifest's check sums, of the tensors as they lie in GPU memory"),
            (None, None) => None,
        }
    }

    pub(super) fn failure(self) -> Option<CliError> {
        let compared = self.compared.and_then(Result::err);
        compared.or_else(|| self.manifest.and_then(Result::err))
    }
}

/// Compares every GPU's memory with the files once more. The outer error is that it could not be done, the inner that
/// bytes differ.
pub(super) fn compare(model: &Model, held: &[Held], context: &Context) -> Result<Result<()>> {
    let go_on = || context.stop.check().is_ok();
    for Held { share, arena, .. } in held {
        let differs = check::compare(&share.plan, &model.files, arena, &go_on);
        if let Some(at) = differs.map_err(|e| given_up(e, context))? {
            let place = format!("byte {} of the arena on, in {}", at.at, at.tensor);
            let gpu = share.gpu.gpu.name();
            let why = format!("the memory of GPU {gpu} and the file differ from {place}");
            return Ok(Err(CliError::Mismatch(why)));
        }
    }
    Ok(Ok(()))
}

/// Holds what lies in GPU memory against the manifest. It knows whole tensors only.
pub(super) fn against((path, manifest): &(&Path, Manifest), model: &Model, held: &[Held]) -> Result<()> {
    for Held { share, sums, .. } in held {
        let sums = sums.as_deref().unwrap_or_default();
        let wrong = check::against(manifest, model, &share.plan, sums);
        wrong.map_err(|why| CliError::Mismatch(format!("{}: {why}", path.display())))?;
    }
    Ok(())
}

/// The error of whoever asked for the end, where it was that.
pub(super) fn given_up(error: onehop_load::Error, context: &Context) -> CliError {
    match error {
        onehop_load::Error::GivenUp => context.stop.check().err().unwrap_or_else(|| error.into()),
        _ => error.into(),
    }
}
