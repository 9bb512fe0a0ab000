//! Errors of this crate.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a board could not be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An unknown option.
    #[error("a simulated board has no option '{name}'; it has {have}")]
    UnknownOption {
        /// Its name.
        name: String,
        /// The known options.
        have: &'static str,
    },
    /// A name that no simulated board has.
    #[error("there is no simulated board '{0}'; sim:usdr is one")]
    UnknownBoard(String),
    /// An invalid value of an option.
    #[error("the board's option {name} takes {takes}, not '{value}'")]
    BadValue {
        /// The option.
        name: &'static str,
        /// The value.
        value: String,
        /// Its valid values.
        takes: &'static str,
    },
    /// Its thread could not be started.
    #[error("the board's thread could not be started: {0}")]
    Thread(std::io::Error),
    /// Memory could not be mapped for it.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
}
