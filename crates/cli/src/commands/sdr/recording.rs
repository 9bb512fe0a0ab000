//! Samples in files as SigMF has them: `NAME.sigmf-data`, and `NAME.sigmf-meta` that says what they are.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{CliError, Result};
use crate::outputs;

/// What is appended to a recording's name.
pub(super) const ENDINGS: [&str; 2] = [".sigmf-data", ".sigmf-meta"];

/// A recording under way.
pub(super) struct Recording {
    data: BufWriter<File>,
    data_path: PathBuf,
    meta_path: PathBuf,
    datatype: &'static str,
    rate: Option<f64>,
    hardware: String,
    samples: u64,
    /// Where samples follow each other without a gap: in the file, and by the board's clock.
    captures: Vec<(u64, u64)>,
}

impl Recording {
    /// Begins a recording; existing files of these names are overwritten.
    pub(super) fn create(
        base: &Path,
        datatype: &'static str,
        rate: Option<f64>,
        hardware: &str,
    ) -> Result<Self> {
        let [data_path, meta_path] = ENDINGS.map(|ending| outputs::with_ending(base, ending));
        let data = BufWriter::with_capacity(1 << 20, outputs::create(&data_path)?);
        let captures = Vec::new();
        let hardware = hardware.to_owned();
        Ok(Self { data, data_path, meta_path, datatype, rate, hardware, samples: 0, captures })
    }

    /// Adds samples, of which the first has this number by the board's clock.
    pub(super) fn add(&mut self, first: u64, samples: u64, bytes: &[u8]) -> Result<()> {
        let follows = self.captures.last().is_some_and(|(at, number)| number + (self.samples - at) == first);
        if !follows {
            self.captures.push((self.samples, first));
        }
        self.data.write_all(bytes).map_err(|e| CliError::file("writing", &self.data_path, e))?;
        self.samples += samples;
        Ok(())
    }

    /// Writes what is left, and what the samples are. Gives the two paths.
    pub(super) fn finish(mut self) -> Result<[PathBuf; 2]> {
        self.data.flush().map_err(|e| CliError::file("writing", &self.data_path, e))?;
        let text = format!("{:#}\n", self.meta());
        outputs::write(&self.meta_path, text)?;
        Ok([self.data_path, self.meta_path])
    }

    fn meta(&self) -> Value {
        let capture =
            |(at, number): &(u64, u64)| json!({ "core:sample_start": at, "core:global_index": number });
        let mut global = json!({
            "core:datatype": self.datatype,
            "core:version": "1.0.0",
            "core:hw": self.hardware,
            "core:recorder": concat!("onehop ", env!("CARGO_PKG_VERSION")),
            "core:num_channels": 1,
        });
        if let Some(rate) = self.rate {
            global["core:sample_rate"] = json!(rate);
        }
        json!({
            "global": global,
            "captures": self.captures.iter().map(capture).collect::<Vec<_>>(),
            "annotations": [],
        })
    }
}

/// What a recording's metadata say of its samples.
pub(super) struct Recorded {
    rate: Option<f64>,
}

impl Recorded {
    /// Of a file of samples; none if it is not a SigMF recording, or has no metadata beside it.
    ///
    /// # Errors
    /// When these are the metadata, or say that the samples are not what boards take.
    pub(super) fn of(data: &Path) -> Result<Option<Self>> {
        let [data_ending, meta_ending] = ENDINGS;
        let Some(name) = data.to_str() else { return Ok(None) };
        if let Some(base) = name.strip_suffix(meta_ending) {
            return Err(CliError::Usage(format!(
                "{name} describes samples; they are in {base}{data_ending}"
            )));
        }
        let Some(base) = name.strip_suffix(data_ending) else { return Ok(None) };
        let meta = format!("{base}{meta_ending}");
        let text = match std::fs::read_to_string(&meta) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(CliError::file("reading", Path::new(&meta), e)),
        };
        let wrong = |why: &str| CliError::Failed(format!("{meta} {why}"));
        let document: Value = serde_json::from_str(&text).map_err(|e| wrong(&format!("is damaged: {e}")))?;
        let global = &document["global"];
        match global["core:datatype"].as_str() {
            Some("ci16_le") => Ok(Some(Self { rate: global["core:sample_rate"].as_f64() })),
            Some(other) => {
                let other = other.escape_debug();
                Err(wrong(&format!("says that the samples are {other}; boards send ci16_le")))
            }
            None => Err(wrong("does not say what the samples are (core:datatype)")),
        }
    }

    /// What is wrong with sending them at this rate.
    pub(super) fn differs(&self, rate: Option<f64>) -> Option<String> {
        let (recorded, rate) = (self.rate?, rate?);
        // A board's clock is that far off at most.
        let alike = (recorded / rate - 1.0).abs() < 1e-3;
        (!alike).then(|| {
            let millions = |rate: f64| rate / 1e6;
            format!(
                "recorded at {} million samples a second, and sent at the board's {}",
                millions(recorded),
                millions(rate)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_begin_a_new_capture() {
        let base = std::env::temp_dir().join(format!("onehop-sigmf-{}", std::process::id()));
        let mut recording = Recording::create(&base, "ci16_le", Some(1e6), "x").unwrap();
        for first in [0, 2, 10, 12] {
            recording.add(first, 2, &[0; 8]).unwrap();
        }
        let [data, meta] = recording.finish().unwrap();
        assert_eq!(std::fs::metadata(&data).unwrap().len(), 32);
        let document: Value = serde_json::from_slice(&std::fs::read(&meta).unwrap()).unwrap();
        let starts = json!([
            { "core:sample_start": 0, "core:global_index": 0 },
            { "core:sample_start": 4, "core:global_index": 10 }
        ]);
        assert_eq!(document["captures"], starts);
        assert_eq!(document["global"]["core:datatype"], "ci16_le");
        let recorded = Recorded::of(&data).unwrap().unwrap();
        assert_eq!([Some(1e6), None].map(|rate| recorded.differs(rate)), [None, None]);
        let differs = recorded.differs(Some(5e6)).unwrap();
        assert_eq!(differs, "recorded at 1 million samples a second, and sent at the board's 5");
        assert!(Recorded::of(&meta).is_err());
        for (text, why) in [("{}", "core:datatype"), ("{", "damaged")] {
            std::fs::write(&meta, text).unwrap();
            assert!(Recorded::of(&data).err().unwrap().to_string().contains(why));
        }
        std::fs::write(&meta, r#"{"global":{"core:datatype":"cf32_le"}}"#).unwrap();
        assert!(Recorded::of(&data).err().unwrap().to_string().contains("samples are cf32_le"));
        for path in [data, meta] {
            std::fs::remove_file(path).unwrap();
        }
    }
}
