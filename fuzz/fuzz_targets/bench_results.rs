//! Results of earlier runs: accepted ones can be compared with themselves, drawn, and written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_bench::compare::{ChangeVerdict, compare};
use onehop_bench::page::sweep_page;
use onehop_bench::results::Results;

fuzz_target!(|text: &[u8]| {
    match Results::parse(text) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(results) => {
            let found = compare(&results, &results);
            assert!(found.differ.is_empty());
            assert!(
                found
                    .changes
                    .iter()
                    .all(|change| matches!(change.verdict, ChangeVerdict::Same | ChangeVerdict::Unsure))
            );
            let page = sweep_page(&results).to_html();
            assert!(
                page.ends_with("</html>\n") && !page.contains("NaN") && page.matches("<script").count() == 1
            );
        }
    }
});
