//! `onehop sdr selftest`: tests every route with data.

use onehop_sdr::SelfTest;
use serde_json::json;

use super::Packing;
use super::board::{self, BoardArg};
use super::notice::{self, SelfTestProgress};
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{Report, ReportText};

/// Test every route between a board and a GPU with data
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop sdr selftest -d 'sim:usdr?signal=counter&rate=50M' -g emu")]
pub(crate) struct Args {
    #[command(flatten)]
    board: BoardArg,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    gpu: GpuArg,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let opened = board::open(&args.board)?;
    let gpu = gpus::choose(&args.gpu)?;
    let card = opened.session.card();
    let shape = args.packing.shape(&card.profile.rx, opened.rate)?;
    let test = SelfTest { shape, counter: opened.counter, limit: opened.timeout(shape.samples()) };
    let steps = {
        let mut progress = SelfTestProgress::new(context, shape);
        let watch = &mut |filled| progress.update(filled);
        onehop_sdr::self_test(&opened.session, &gpu.gpu, &test, watch).map_err(notice::self_test_error)?
    };
    let mut text = ReportText::default();
    text.row("board", format!("{}{}", card.name, if card.simulated { " (simulated)" } else { "" }));
    text.row("gpu", format!("{}: {}", gpu.gpu.name(), gpu.why));
    let status = |passed| match passed {
        Some(true) => "pass",
        Some(false) => "fail",
        None => "unknown",
    };
    for step in &steps {
        text.row(status(step.passed), format!("{}: {}", step.name, step.found));
        if !step.fix.is_empty() {
            text.row("", &step.fix);
        }
    }
    let violations = opened.violations();
    for (rule, detail) in &violations {
        text.row("violation", format!("{rule}: {detail}"));
    }
    // Host memory must work. That GPU memory does not is a result, not a failure.
    let is_required = |name: &str| !name.ends_with("GPU memory");
    let failed = steps.iter().find(|step| step.passed == Some(false) && is_required(step.name));
    let failure = match failed {
        Some(step) => Some(CliError::Failed(format!("{}: {}. {}", step.name, step.found, step.fix))),
        None if !violations.is_empty() => {
            Some(CliError::Failed("the driver violated a rule of the board".into()))
        }
        None => None,
    };
    let list: Vec<_> = steps
        .iter()
        .map(|step| json!({ "id": step.name, "status": status(step.passed), "found": step.found, "fix": step.fix }))
        .collect();
    let simulated: Vec<_> = [(card.simulated, "board"), (gpu.gpu.simulated(), "gpu")]
        .into_iter()
        .filter(|(is, _)| *is)
        .map(|(_, n)| n)
        .collect();
    let document =
        json!({ "device": card.name, "gpu": gpu.gpu.name(), "simulated": simulated, "checks": list });
    Ok(Report::new(document, text)?.failed(failure))
}
