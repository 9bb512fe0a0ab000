//! The native half of the Python package `onehop`. Users call `onehop/__init__.py`. Here are open model files
//! ([`model`]), running loads ([`job`]), their tensors ([`tensor`]) and outcomes ([`outcome`]), and tables whose rows
//! are gathered ([`table`]), and files whose pages are moved ([`pages`]).

mod borrowed;
mod descriptors;
mod device;
mod dlpack;
mod drive;
mod dtype;
mod error;
mod gather;
mod group;
mod job;
mod model;
mod outcome;
mod pages;
mod pool;
mod rows_on_drive;
mod table;
mod tensor;
mod views;

use pyo3::prelude::*;

// Otherwise a free-threaded Python would run the module without the GIL, which has not been tested.
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
    use super::pages::PageFile;
    #[pymodule_export]
    use super::table::RowTable;
    #[pymodule_export]
    use super::tensor::Tensor;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "its name in Python")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
