//! SigMF recordings: samples in `NAME.sigmf-data`, metadata in `NAME.sigmf-meta`.

use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onehop_radio::Format;
use serde_json::{Value, json};

use crate::error::{CliError, Result};
use crate::{outputs, report};

/// File name endings of a recording.
pub(super) const ENDINGS: [&str; 2] = [".sigmf-data", ".sigmf-meta"];
/// Precedes the ending until the recording is complete.
const PARTIAL: &str = ".partial";

/// What a recording contains.
pub(super) struct Content<'a> {
    /// The format of added samples.
    pub format: Format,
    /// A factor for all samples; `None` to record them as the board sent them.
    pub gain: Option<f32>,
    /// Samples per second, if known.
    pub rate: Option<f64>,
    /// The board.
    pub hardware: &'a str,
}

/// A recording in progress. Samples and metadata are written to partial files, which replace an earlier recording when
/// they are complete. So samples are never paired with another recording's metadata, however this ends. The partial
/// data file is locked from its creation until it has its final name.
pub(super) struct Recording {
    data: BufWriter<File>,
    /// Paths of the partial data and metadata.
    partial: [PathBuf; 2],
    /// Metadata is written here, then renamed.
    draft: PathBuf,
    complete: [PathBuf; 2],
    format: Format,
    gain: Option<f32>,
    rate: Option<f64>,
    hardware: String,
    samples: u64,
    /// Starts of runs of samples without a gap: index in the file, and number by the board's clock.
    captures: Vec<(u64, u64)>,
    is_over: bool,
}

impl Recording {
    /// Starts a recording. An earlier one of this name is kept until [`Self::finish`].
    ///
    /// # Errors
    /// When another process is recording to that name.
    pub(super) fn create(base: &Path, content: &Content<'_>) -> Result<Self> {
        let complete = ENDINGS.map(|ending| outputs::with_ending(base, ending));
        let partial = ENDINGS.map(|ending| outputs::with_ending(base, format!("{PARTIAL}{ending}")));
        let draft = outputs::with_ending(base, format!("{PARTIAL}{}.new", ENDINGS[1]));
        let Content { format, gain, rate, hardware } = *content;
        let data = BufWriter::with_capacity(1 << 20, claim(&partial[0], base)?);
        let recording = Self {
            data,
            partial,
            draft,
            complete,
            format,
            gain,
            rate,
            hardware: hardware.to_owned(),
            samples: 0,
            captures: Vec::new(),
            is_over: false,
        };
        // Metadata must exist before the first sample.
        recording.describe()?;
        Ok(recording)
    }

    /// Adds samples as the board sent them. `first` is the number of the first one by the board's clock.
    pub(super) fn add(&mut self, first: u64, wire: &[u8]) -> Result<()> {
        let follows = self.captures.last().is_some_and(|(at, number)| number + (self.samples - at) == first);
        if !follows {
            self.captures.push((self.samples, first));
        }
        let written = match (self.format, self.gain) {
            (Format::Ci16, None) => self.data.write_all(wire),
            (format, gain) => self.data.write_all(&encode(format, gain, wire)),
        };
        written.map_err(|e| CliError::file("writing", &self.partial[0], e))?;
        self.samples += wire.len() as u64 / u64::from(self.format.bytes());
        Ok(())
    }

    /// Completes the recording, and replaces an earlier one of this name.
    pub(super) fn finish(mut self) -> Result<()> {
        self.data.flush().map_err(|e| CliError::file("writing", &self.partial[0], e))?;
        self.describe()?;
        // Steps that may run out of space come before the earlier recording is removed. The order of the others ensures
        // that, wherever this is interrupted, data and metadata of each name belong together.
        self.write_draft()?;
        remove(&self.complete[0])?;
        rename(&self.draft, &self.complete[1])?;
        // The data file is renamed last: from then on, another process may record to this name.
        remove(&self.partial[1])?;
        rename(&self.partial[0], &self.complete[0])?;
        self.is_over = true;
        Ok(())
    }

    /// Replaces the partial metadata atomically.
    fn describe(&self) -> Result<()> {
        self.write_draft()?;
        rename(&self.draft, &self.partial[1])
    }

    fn write_draft(&self) -> Result<()> {
        remove(&self.draft)?;
        outputs::write(&self.draft, format!("{:#}\n", self.meta()))
    }

    fn meta(&self) -> Value {
        let capture =
            |(at, number): &(u64, u64)| json!({ "core:sample_start": at, "core:global_index": number });
        let mut global = json!({
            "core:datatype": if self.gain.is_some() { "cf32_le" } else { "ci16_le" },
            "core:version": "1.0.0",
            "core:hw": self.hardware,
            "core:recorder": concat!("onehop ", env!("CARGO_PKG_VERSION")),
            "core:num_channels": 1,
        });
        if let Some(rate) = self.rate {
            global["core:sample_rate"] = json!(rate);
        }
        let mut words = Vec::new();
        if self.format == Format::Ci12 {
            words.push("12-bit samples, in the upper bits of 16".to_owned());
        }
        if let Some(gain) = self.gain {
            words.push(format!("full scale is 1, multiplied by {gain} (--gain)"));
        }
        if !words.is_empty() {
            global["core:description"] = words.join("; ").into();
        }
        json!({
            "global": global,
            "captures": self.captures.iter().map(capture).collect::<Vec<_>>(),
            "annotations": [],
        })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        if self.samples > 0 {
            let _ = self.data.flush();
            // Only the gaps are new; the rest of the metadata was written at the start.
            let _ = self.describe();
            let _ = remove(&self.draft);
            report::warn(&format!(
                "the samples received before the failure are in {}",
                self.partial[0].display()
            ));
            return;
        }
        let [data, meta] = &self.partial;
        for path in [&self.draft, meta, data] {
            let _ = remove(path);
        }
    }
}

/// Creates and locks the partial data file. One left by a killed process is replaced.
fn claim(path: &Path, base: &Path) -> Result<File> {
    let busy = || CliError::Failed(format!("another process is recording to {}", base.display()));
    // Before the file is locked, another process can replace it.
    let lock = |file: File| match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(busy()),
        // Some network file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) if is_at(&file, path) => Ok(file),
        _ => Err(busy()),
    };
    let mut open = File::options();
    // Opening a FIFO for both directions does not block; nothing is read.
    open.read(true).write(true);
    // Held until the new file is locked.
    let _earlier = match open.open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        opened => {
            let earlier = lock(opened.map_err(|e| CliError::file("opening", path, e))?)?;
            remove(path)?;
            Some(earlier)
        }
    };
    match open.create_new(true).open(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(busy()),
        opened => lock(opened.map_err(|e| CliError::file("creating", path, e))?),
    }
}

/// Whether the path still names this file.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |meta: &fs::Metadata| (meta.dev(), meta.ino());
    matches!((file.metadata(), path.metadata()), (Ok(file), Ok(path)) if identity(&file) == identity(&path))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| CliError::file("renaming", from, e))
}

/// Removes a file if it exists.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(CliError::file("removing", path, e)),
        _ => Ok(()),
    }
}

/// Encodes samples for a recording: 16-bit integers, or floating-point numbers if they have a gain.
fn encode(format: Format, gain: Option<f32>, wire: &[u8]) -> Vec<u8> {
    let sample = |bytes: &[u8]| {
        let bits = bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
        let sample = format.sample(bits);
        [sample.i, sample.q]
    };
    let values = wire.chunks_exact(format.bytes() as usize).flat_map(sample);
    match gain {
        None => values.flat_map(i16::to_le_bytes).collect(),
        Some(gain) => values.flat_map(|value| (f32::from(value) / 32768.0 * gain).to_le_bytes()).collect(),
    }
}

/// Metadata of an existing recording.
pub(super) struct Recorded {
    rate: Option<f64>,
}

impl Recorded {
    /// The metadata for a data file; `None` if it is no SigMF recording or has no metadata.
    ///
    /// # Errors
    /// When this is a metadata file, or the samples have a format that boards do not accept.
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
        let text = match fs::read_to_string(&meta) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                report::warn(&format!("there is no {meta}; samples in {name} are assumed to be ci16_le"));
                return Ok(None);
            }
            Err(e) => return Err(CliError::file("reading", Path::new(&meta), e)),
        };
        let wrong = |why: &str| CliError::Failed(format!("{meta} {why}"));
        let document: Value = serde_json::from_str(&text).map_err(|e| wrong(&format!("is damaged: {e}")))?;
        let global = &document["global"];
        match global["core:datatype"].as_str() {
            Some("ci16_le") => Ok(Some(Self { rate: global["core:sample_rate"].as_f64() })),
            Some(other) => {
                let other = other.escape_debug();
                Err(wrong(&format!("says that the samples are {other}; boards accept ci16_le only")))
            }
            None => Err(wrong("does not specify the format of the samples (core:datatype)")),
        }
    }

    /// A warning if the recording has another rate than the board.
    pub(super) fn rate_mismatch(&self, rate: Option<f64>) -> Option<String> {
        let (recorded, rate) = (self.rate?, rate?);
        // Clock errors of boards are smaller.
        let is_equal = (recorded / rate - 1.0).abs() < 1e-3;
        (!is_equal).then(|| {
            let millions = |rate: f64| rate / 1e6;
            format!(
                "recorded at {} million samples per second, but sent at {}, the board's rate",
                millions(recorded),
                millions(rate)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a recording with this name.
    fn record(name: &str, format: Format, gain: Option<f32>) -> (PathBuf, Recording) {
        let base = std::env::temp_dir().join(format!("onehop-sigmf-{}-{name}", std::process::id()));
        let content = Content { format, gain, rate: Some(1e6), hardware: "x" };
        let recording = Recording::create(&base, &content).unwrap();
        (base, recording)
    }

    fn paths(base: &Path) -> [PathBuf; 2] {
        ENDINGS.map(|ending| outputs::with_ending(base, ending))
    }

    fn datatype(meta: &Path) -> Value {
        let document: Value = serde_json::from_slice(&fs::read(meta).unwrap()).unwrap();
        document["global"]["core:datatype"].clone()
    }

    #[test]
    fn data_and_metadata_match_however_a_recording_ends() {
        let (base, mut recording) = record("ends", Format::Ci16, None);
        let ([data, meta], partial) = (paths(&base), recording.partial.clone());
        recording.add(0, &[1; 8]).unwrap();
        recording.finish().unwrap();
        assert!(partial.iter().all(|path| !path.exists()));
        let earlier = fs::read(&meta).unwrap();
        let is_earlier = || fs::read(&data).unwrap() == [1; 8] && fs::read(&meta).unwrap() == earlier;
        // A recording without samples leaves nothing.
        drop(record("ends", Format::Ci16, Some(2.0)).1);
        assert!(is_earlier() && partial.iter().all(|path| !path.exists()));
        // A killed recording leaves its partial files.
        let (_, mut killed) = record("ends", Format::Ci16, Some(2.0));
        killed.add(0, &[2; 8]).unwrap();
        killed.data.flush().unwrap();
        assert!(is_earlier());
        assert_eq!(datatype(&partial[1]), "cf32_le");
        assert!(Recorded::of(&partial[0]).err().unwrap().to_string().contains("samples are cf32_le"));
        // Meanwhile, no other process may record to the name.
        let second = Content { format: Format::Ci16, gain: None, rate: None, hardware: "y" };
        let refused = Recording::create(&base, &second).err().unwrap().to_string();
        assert!(refused.contains("another process is recording to"), "{refused}");
        assert_eq!(fs::read(&partial[0]).unwrap().len(), 16);
        // Release the lock, as the death of the process would.
        killed.data = BufWriter::new(File::open("/dev/null").unwrap());
        std::mem::forget(killed);
        // A recording that fails later keeps its partial files.
        let (_, mut failed) = record("ends", Format::Ci16, None);
        assert_eq!(datatype(&partial[1]), "ci16_le");
        failed.add(0, &[3; 8]).unwrap();
        failed.add(9, &[3; 8]).unwrap();
        drop(failed);
        assert!(is_earlier());
        assert_eq!(fs::read(&partial[0]).unwrap(), [3; 16]);
        let document: Value = serde_json::from_slice(&fs::read(&partial[1]).unwrap()).unwrap();
        assert_eq!(document["captures"][1]["core:global_index"], 9);
        // The next recording replaces all of them.
        let (_, mut recording) = record("ends", Format::Ci16, Some(2.0));
        recording.add(0, &[0, 0, 0, 64]).unwrap();
        recording.finish().unwrap();
        assert_eq!(datatype(&meta), "cf32_le");
        assert_eq!(fs::read(&data).unwrap(), [0f32, 1.0].map(f32::to_le_bytes).concat());
        assert!(partial.iter().all(|path| !path.exists()));
        for path in [data, meta] {
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn an_earlier_recording_is_kept_if_finishing_fails() {
        let (base, mut recording) = record("full", Format::Ci16, None);
        let [data, meta] = paths(&base);
        recording.add(0, &[1; 8]).unwrap();
        recording.finish().unwrap();
        let (_, mut recording) = record("full", Format::Ci16, None);
        recording.add(0, &[2; 8]).unwrap();
        // A directory in place of the draft makes writing it fail.
        fs::create_dir(&recording.draft).unwrap();
        let (draft, partial) = (recording.draft.clone(), recording.partial.clone());
        assert!(recording.finish().is_err());
        assert_eq!(fs::read(&data).unwrap(), [1; 8]);
        assert_eq!(datatype(&partial[1]), "ci16_le");
        fs::remove_dir(draft).unwrap();
        for path in [data, meta].iter().chain(&partial) {
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn twelve_bit_samples_are_recorded_in_16_bits() {
        let (base, mut recording) = record("twelve", Format::Ci12, None);
        // I = 0x321, Q = -1.
        recording.add(0, &[0x21, 0xf3, 0xff]).unwrap();
        recording.finish().unwrap();
        let [data, meta] = paths(&base);
        assert_eq!(fs::read(&data).unwrap(), [0x10, 0x32, 0xf0, 0xff]);
        let document: Value = serde_json::from_slice(&fs::read(&meta).unwrap()).unwrap();
        assert!(document["global"]["core:description"].as_str().unwrap().contains("12-bit"));
        assert!(Recorded::of(&data).unwrap().is_some());
        for path in [data, meta] {
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn gaps_begin_a_new_capture() {
        let (base, mut recording) = record("gaps", Format::Ci16, None);
        for first in [0, 2, 10, 12] {
            recording.add(first, &[0; 8]).unwrap();
        }
        recording.finish().unwrap();
        let [data, meta] = paths(&base);
        assert_eq!(fs::metadata(&data).unwrap().len(), 32);
        let document: Value = serde_json::from_slice(&fs::read(&meta).unwrap()).unwrap();
        let starts = json!([
            { "core:sample_start": 0, "core:global_index": 0 },
            { "core:sample_start": 4, "core:global_index": 10 }
        ]);
        assert_eq!(document["captures"], starts);
        assert_eq!(document["global"]["core:datatype"], "ci16_le");
        let recorded = Recorded::of(&data).unwrap().unwrap();
        assert_eq!([Some(1e6), None].map(|rate| recorded.rate_mismatch(rate)), [None, None]);
        let warning = recorded.rate_mismatch(Some(5e6)).unwrap();
        assert_eq!(warning, "recorded at 1 million samples per second, but sent at 5, the board's rate");
        assert!(Recorded::of(&meta).is_err());
        for (text, why) in [("{}", "core:datatype"), ("{", "damaged")] {
            fs::write(&meta, text).unwrap();
            assert!(Recorded::of(&data).err().unwrap().to_string().contains(why));
        }
        fs::write(&meta, r#"{"global":{"core:datatype":"cf32_le"}}"#).unwrap();
        assert!(Recorded::of(&data).err().unwrap().to_string().contains("samples are cf32_le"));
        for path in [data, meta] {
            fs::remove_file(path).unwrap();
        }
    }
}
