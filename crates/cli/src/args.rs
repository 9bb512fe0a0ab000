//! The command line. The arguments of each command are in its module.

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands;

/// Move bytes from NVMe drives, files, RDMA NICs and SDR boards into GPU memory, and report the route they took
#[derive(Parser)]
#[command(
    name = "onehop",
    version = env!("ONEHOP_VERSION"),
    max_term_width = 80,
    subcommand_required = true,
    after_help = "Examples:\n  onehop demo\n  onehop read -d sim:mem:64M --lba 0 --blocks 2048 --verify\n\n\
                  Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 not possible on this machine,\n130 stopped by Ctrl-C."
)]
pub(crate) struct Args {
    /// Print one JSON document on stdout
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// The arguments of this process.
///
/// # Errors
/// Argument errors. Clap also reports help and version as errors.
pub(crate) fn parse() -> Result<Args, clap::Error> {
    let matches = allow_negative_numbers(Args::command()).try_get_matches()?;
    Args::from_arg_matches(&matches)
}

/// Accepts negative numbers as values, so that they are reported as wrong values, not as unknown options.
fn allow_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(allow_negative_numbers)
}

/// The help of `-g` for commands that only describe GPUs.
pub(crate) const ONE_GPU: &str = "Only this GPU: a CUDA ordinal such as 0, or a PCI address [default: all]";

#[derive(Subcommand)]
pub(crate) enum Command {
    Demo(commands::demo::Args),
    Load(commands::load::Args),
    Map(commands::map::Args),
    Read(commands::read::Args),
    Write(commands::write::Args),
    /// Inspect, bind and reset NVMe drives
    #[command(subcommand_required = true, after_help = "Example:\n  onehop drive identify -d sim:mem:64M")]
    Drive {
        #[command(subcommand)]
        command: DriveCommand,
    },
    Doctor(commands::doctor::Args),
    Topo(commands::topo::Args),
    Report(commands::report::Args),
    Mount(commands::mount::Args),
    Target(commands::target::Args),
    Bench(commands::bench::Args),
    /// Serve simulated devices to other programs
    #[command(
        subcommand_required = true,
        after_help = "Example:\n  onehop sim serve -d sim:disk.img --socket /tmp/drive.sock"
    )]
    Sim {
        #[command(subcommand)]
        command: SimCommand,
    },
    /// Receive samples of an SDR board into GPU memory, and send samples
    #[command(
        subcommand_required = true,
        after_help = "Example:\n  onehop sdr rx -d 'sim:usdr?rate=1M' --seconds 1 -g emu"
    )]
    Sdr {
        #[command(subcommand)]
        command: commands::sdr::SdrCommand,
    },
    /// Run programs written for cuFile (GPUDirect Storage) with onehop's library
    #[command(subcommand_required = true, after_help = "Example:\n  onehop cufile run -- python3 train.py")]
    Cufile {
        #[command(subcommand)]
        command: commands::cufile::CuFileCommand,
    },
    Completions(commands::completions::Args),
    Man(commands::man::Args),
    Schema(commands::schema::Args),
}

#[derive(Subcommand)]
pub(crate) enum SimCommand {
    Serve(commands::serve::Args),
}

#[derive(Subcommand)]
pub(crate) enum DriveCommand {
    List(commands::list::Args),
    Identify(commands::identify::Args),
    Smart(commands::smart::Args),
    Errors(commands::errors::Args),
    DumpBar0(commands::bar0::Args),
    Reset(commands::reset::Args),
    Bind(commands::bind::BindArgs),
    Unbind(commands::bind::UnbindArgs),
    Recover(commands::recover::Args),
    #[command(name = "check-p2p")]
    CheckP2p(commands::check_p2p::Args),
}
