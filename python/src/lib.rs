//! The native half of the Python package `onehop`. What users call is in `onehop/__init__.py`; here are model files
//! that are open ([`model`]), a load under way ([`job`]), its tensors
//! ([`tensor`]) and outcome ([`outcome`]), and tables whose rows are gathered ([`table`]).

mod descriptors;
mod device;
mod dlpack;
mod drive;
mod dtype;
mod error;
mod gather;
mod group;
mod job;
mod lent;
mod model;
mod outcome;
mod pool;
mod table;
mod tensor;
mod views;

use pyo3::prelude::*;

// Without a word a free-threaded Python would take the module for one that needs no GIL, and it has not been tested without.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use super::group::decline_group;
    #[pymodule_export]
    use super::job::Job;
    #[pymodule_export]
    use super::model::Model;
    #[pymodule_export]
    use super::outcome::{GroupOutcome, Limit, Outcome, WhyNot};
    #[pymodule_export]
    use super::table::RowTable;
    #[pymodule_export]
    use super::tensor::Tensor;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "its name in Python")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
