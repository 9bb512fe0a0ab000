//! Why a board could not be made.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a board could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option that there is not.
    #[error("a simulated board has no option '{name}'; it has {have}")]
    UnknownOption {
        /// Its name.
        name: String,
        /// The options that there are.
        have: &'static str,
    },
    /// A value that an option does not take.
    #[error("the board's option {name} takes {takes}, not '{value}'")]
    BadValue {
        /// The option.
        name: &'static str,
        /// The value.
        value: String,
        /// What it takes.
        takes: &'static str,
    },
    /// Its thread could not be started.
    #[error("this machine gave no thread for the board: {0}")]
    Thread(std::io::Error),
    /// Memory could not be mapped for it.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
}
