//! Samples in files as SigMF has them: `NAME.sigmf-data`, and `NAME.sigmf-meta` that says what they are.

use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onehop_radio::Format;
use serde_json::{Value, json};

use crate::error::{CliError, Result};
use crate::{outputs, report};

/// What is appended to a recording's name.
pub(super) const ENDINGS: [&str; 2] = [".sigmf-data", ".sigmf-meta"];
/// What is appended to it before, until the recording is complete.
const PARTIAL: &str = ".partial";

/// What a recording holds.
pub(super) struct Content<'a> {
    /// The format of the samples that it is given.
    pub format: Format,
    /// The factor by which the user wants samples multiplied. Without one, they are the board's.
    pub gain: Option<f32>,
    /// Samples a second, where that is known.
    pub rate: Option<f64>,
    /// The board.
    pub hardware: &'a str,
}

/// A recording under way. Its samples are in a file of another name, with their metadata beside them, and take the place of
/// an earlier recording when they are complete. So samples never lie beside another recording's metadata, however this ends.
/// The data file is locked from before it is the only one of its name until it has its final name.
pub(super) struct Recording {
    data: BufWriter<File>,
    /// The paths of data and metadata.
    partial: [PathBuf; 2],
    /// Metadata are written here first.
    draft: PathBuf,
    complete: [PathBuf; 2],
    format: Format,
    gain: Option<f32>,
    rate: Option<f64>,
    hardware: String,
    samples: u64,
    /// Where samples follow each other without a gap: in the file, and by the board's clock.
    captures: Vec<(u64, u64)>,
    is_over: bool,
}

impl Recording {
    /// Begins a recording. An earlier one of this name stays until [`Self::finish`].
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
        // Before there are samples.
        recording.describe()?;
        Ok(recording)
    }

    /// Adds samples as the board sent them, of which the first has this number by its clock.
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

    /// Completes it, and replaces an earlier recording of this name.
    pub(super) fn finish(mut self) -> Result<()> {
        self.data.flush().map_err(|e| CliError::file("writing", &self.partial[0], e))?;
        self.describe()?;
        // What may fail for want of room comes before the earlier recording goes. The order of the rest is such that, whatever is
        // interrupted, the data of either name belong to its metadata.
        self.write_draft()?;
        remove(&self.complete[0])?;
        rename(&self.draft, &self.complete[1])?;
        // The data come last: from then on, another process may record to this name.
        remove(&self.partial[1])?;
        rename(&self.partial[0], &self.complete[0])?;
        self.is_over = true;
        Ok(())
    }

    /// Puts metadata beside the partial data: all of them, or those of before stay.
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
            // Where the gaps are; what the samples are has been there from the start.
            let _ = self.describe();
            let _ = remove(&self.draft);
            report::warn(&format!("what came before the failure is in {}", self.partial[0].display()));
            return;
        }
        let [data, meta] = &self.partial;
        for path in [&self.draft, meta, data] {
            let _ = remove(path);
        }
    }
}

/// An empty file for the data of a recording, locked. What a process that was killed has left is replaced.
fn claim(path: &Path, base: &Path) -> Result<File> {
    let held = || CliError::Failed(format!("another process is recording to {}", base.display()));
    // Until the lock is there, another process can take the name.
    let lock = |file: File| match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(held()),
        // Some network file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) if is_at(&file, path) => Ok(file),
        _ => Err(held()),
    };
    let mut open = File::options();
    // A FIFO that is opened for both does not wait; nothing is read.
    open.read(true).write(true);
    // Held until the new one is locked.
    let _earlier = match open.open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        opened => {
            let earlier = lock(opened.map_err(|e| CliError::file("opening", path, e))?)?;
            remove(path)?;
            Some(earlier)
        }
    };
    match open.create_new(true).open(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(held()),
        opened => lock(opened.map_err(|e| CliError::file("creating", path, e))?),
    }
}

/// Whether this path names this file.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |meta: &fs::Metadata| (meta.dev(), meta.ino());
    matches!((file.metadata(), path.metadata()), (Ok(file), Ok(path)) if identity(&file) == identity(&path))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| CliError::file("renaming", from, e))
}

/// Removes a file, if there is one.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(CliError::file("removing", path, e)),
        _ => Ok(()),
    }
}

/// Samples as a recording holds them: 16 bits, or floating-point numbers if they are multiplied.
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
        let text = match fs::read_to_string(&meta) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                report::warn(&format!("there is no {meta}; samples of {name} are taken for ci16_le"));
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

    /// A recording of that name.
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
    fn data_and_metadata_belong_together_however_a_recording_ends() {
        let (base, mut recording) = record("ends", Format::Ci16, None);
        let ([data, meta], partial) = (paths(&base), recording.partial.clone());
        recording.add(0, &[1; 8]).unwrap();
        recording.finish().unwrap();
        assert!(partial.iter().all(|path| !path.exists()));
        let earlier = fs::read(&meta).unwrap();
        let is_earlier = || fs::read(&data).unwrap() == [1; 8] && fs::read(&meta).unwrap() == earlier;
        // One that fails before it begins.
        drop(record("ends", Format::Ci16, Some(2.0)).1);
        assert!(is_earlier() && partial.iter().all(|path| !path.exists()));
        // One that is killed.
        let (_, mut killed) = record("ends", Format::Ci16, Some(2.0));
        killed.add(0, &[2; 8]).unwrap();
        killed.data.flush().unwrap();
        assert!(is_earlier());
        assert_eq!(datatype(&partial[1]), "cf32_le");
        assert!(Recorded::of(&partial[0]).err().unwrap().to_string().contains("samples are cf32_le"));
        // While it is under way, its name is taken.
        let second = Content { format: Format::Ci16, gain: None, rate: None, hardware: "y" };
        let refused = Recording::create(&base, &second).err().unwrap().to_string();
        assert!(refused.contains("another process is recording to"), "{refused}");
        assert_eq!(fs::read(&partial[0]).unwrap().len(), 16);
        // What is killed has no file open.
        killed.data = BufWriter::new(File::open("/dev/null").unwrap());
        std::mem::forget(killed);
        // One that fails later: what it has is kept.
        let (_, mut failed) = record("ends", Format::Ci16, None);
        assert_eq!(datatype(&partial[1]), "ci16_le");
        failed.add(0, &[3; 8]).unwrap();
        failed.add(9, &[3; 8]).unwrap();
        drop(failed);
        assert!(is_earlier());
        assert_eq!(fs::read(&partial[0]).unwrap(), [3; 16]);
        let document: Value = serde_json::from_slice(&fs::read(&partial[1]).unwrap()).unwrap();
        assert_eq!(document["captures"][1]["core:global_index"], 9);
        // The next one replaces all of them.
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
    fn an_earlier_recording_goes_when_nothing_is_left_to_write() {
        let (base, mut recording) = record("full", Format::Ci16, None);
        let [data, meta] = paths(&base);
        recording.add(0, &[1; 8]).unwrap();
        recording.finish().unwrap();
        let (_, mut recording) = record("full", Format::Ci16, None);
        recording.add(0, &[2; 8]).unwrap();
        // Nothing can be written there.
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
    fn samples_of_twelve_bits_are_recorded_as_they_are() {
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
        assert_eq!([Some(1e6), None].map(|rate| recorded.differs(rate)), [None, None]);
        let differs = recorded.differs(Some(5e6)).unwrap();
        assert_eq!(differs, "recorded at 1 million samples a second, and sent at the board's 5");
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
