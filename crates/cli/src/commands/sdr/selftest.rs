//! `onehop sdr selftest`: tries every route with data.

use onehop_sdr::SelfTest;
use serde_json::json;

use super::Packing;
use super::board::{self, BoardArg};
use super::notice::{self, Notice};
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

/// Runs the command.
pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let opened = board::open(&args.board)?;
    let gpu = gpus::choose(&args.gpu)?;
    let card = opened.session.card();
    let shape = args.packing.shape(&card.profile.rx, opened.rate)?;
    let test = SelfTest { shape, counter: opened.counter, limit: opened.patience(shape.samples()) };
    let steps = {
        let mut notice = Notice::new(context, shape);
        let watch = &mut |filled| notice.tell(filled);
        onehop_sdr::self_test(&opened.session, &gpu.gpu, &test, watch).map_err(notice::ended)?
    };
    let mut text = ReportText::default();
    text.row("board", format!("{}{}", card.name, if card.simulated { " (simulated)" } else { "" }));
    text.row("gpu", format!("{}: {}", gpu.gpu.name(), gpu.why));
    let words = |passed| match passed {
        Some(true) => "pass",
        Some(false) => "fail",
        None => "unknown",
    };
    for step in &steps {
        text.row(words(step.passed), format!("{}: {}", step.name, step.found));
        if !step.fix.is_empty() {
            text.row("", &step.fix);
        }
    }
    let breaches = opened.breaches();
    for (rule, detail) in &breaches {
        text.row("breach", format!("{rule}: {detail}"));
    }
    // Host memory has to work; whether GPU memory does is what is asked.
    let needed = |name: &str| !name.ends_with("GPU memory");
    let failed = steps.iter().find(|step| step.passed == Some(false) && needed(step.name));
    let failure = match failed {
        Some(step) => Some(CliError::Failed(format!("{}: {}. {}", step.name, step.found, step.fix))),
        None if !breaches.is_empty() => Some(CliError::Failed("the driver broke a rule of the board".into())),
        None => None,
    };
    let list: Vec<_> = steps
        .iter()
        .map(|step| json!({ "id": step.name, "status": words(step.passed), "found": step.found, "fix": step.fix }))
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
