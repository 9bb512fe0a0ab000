//! `onehop sdr info`: what a board can do, and what its ring would look like.

use onehop_radio::BUFFERS;
use serde_json::json;

use super::Packing;
use super::board::{self, BoardArg};
use crate::error::Result;
use crate::report::{Report, ReportText};
use crate::units;

/// Show what a board can do
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop sdr info -d sim:usdr")]
pub(crate) struct Args {
    #[command(flatten)]
    board: BoardArg,
    #[command(flatten)]
    packing: Packing,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let opened = board::open(&args.board)?;
    let card = opened.session.card();
    let id =
        opened.simulation.as_ref().map(|model| (model.config().vendor, model.config().device)).or(card.id);
    let hex = |id: u16| format!("{id:#06x}");
    let (rx, tx) = (card.profile.rx, card.profile.tx);
    let shape = args.packing.shape(&rx, opened.rate)?;
    let mut text = ReportText::default();
    let model = if card.simulated { ", simulated" } else { "" };
    let numbers = id.map_or(String::new(), |(vendor, device)| format!(": {vendor:04x}:{device:04x}"));
    text.row("board", format!("{}{numbers}{model}", card.name));
    text.row(
        "dma",
        format!("{BUFFERS} buffers for each stream, {} address bits, no scatter-gather", rx.mask_bits),
    );
    text.row(
        "rx",
        format!(
            "buffers of at most {} in at most {} bursts",
            units::bytes(rx.max_bytes.into()),
            rx.max_bursts
        ),
    );
    text.row("tx", format!("buffers of at most {}", units::bytes(tx.max_bytes.into())));
    let of_rate = |rate: f64| format!("{:.3} million samples a second", rate / 1e6);
    text.row("rate", opened.rate.map_or("unknown; the board's own library sets it".into(), of_rate));
    text.row(
        "ring",
        format!(
            "{} of {} in {} bursts, {} in all{}",
            shape.format,
            units::bytes(shape.bytes().into()),
            shape.bursts,
            units::bytes(shape.ring_bytes()),
            opened.rate.map_or(String::new(), |rate| {
                let time = std::time::Duration::from_secs_f64(f64::from(shape.samples()) / rate);
                format!("; one is full every {}", units::time(time))
            }),
        ),
    );
    let document = json!({
        "device": card.name,
        "simulated": if card.simulated { vec!["board"] } else { vec![] },
        "vendor": id.map(|id| hex(id.0)),
        "device_id": id.map(|id| hex(id.1)),
        "rate": opened.rate,
        "buffers": BUFFERS,
        "mask_bits": rx.mask_bits,
        "rx": { "max_bytes": rx.max_bytes, "max_bursts": rx.max_bursts, "max_burst_samples": rx.max_burst_samples },
        "tx": { "max_bytes": tx.max_bytes },
        "ring": {
            "format": shape.format.name(), "bytes": shape.bytes(), "samples": shape.samples(), "bursts": shape.bursts,
            "ring_bytes": shape.ring_bytes(),
        },
    });
    Report::new(document, text)
}
