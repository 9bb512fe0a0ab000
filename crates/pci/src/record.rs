//! A recorded system: the files that were read, and its answers to queries, in one JSON document.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The version of the format.
const VERSION: u32 = 1;
/// Zeros that separate two runs of bytes.
const GAP: usize = 16;
/// Upper limit of a file in a record.
const MAX_FILE: usize = 16 << 20;

/// What was read from a system. Paths are those of the system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The version of the format: 1.
    pub onehop_system: u32,
    /// A description for people.
    #[serde(default)]
    pub about: String,
    /// Whether it was composed by hand instead of read from a machine.
    #[serde(default)]
    pub composed: bool,
    /// Files by path.
    #[serde(default)]
    pub files: BTreeMap<String, Content>,
    /// Targets of symbolic links, by path.
    #[serde(default)]
    pub links: BTreeMap<String, String>,
    /// Names in folders. What the other lists have below a folder need not be repeated.
    #[serde(default)]
    pub folders: BTreeMap<String, Vec<String>>,
    /// Names of vendors and devices.
    #[serde(default)]
    pub names: BTreeMap<String, String>,
    /// Answers to queries that are not files.
    #[serde(default)]
    pub answers: BTreeMap<String, serde_json::Value>,
}

/// The contents of a file, or why they are unknown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Text.
    Text(String),
    /// Bytes that are not text: their number, and the non-zero ones in hexadecimal.
    Bytes {
        /// Number of bytes.
        bytes: usize,
        /// Non-zero runs, each with its offset.
        hex: Vec<(usize, String)>,
    },
    /// This user was not allowed to read it.
    Denied {
        /// Always true.
        denied: bool,
    },
    /// It could not be read.
    Failed {
        /// Why.
        failed: String,
    },
    /// It exists, but was not read.
    There {
        /// Always true.
        there: bool,
    },
}

impl Record {
    /// An empty record.
    #[must_use]
    pub fn new() -> Self {
        Self { onehop_system: VERSION, ..Self::default() }
    }

    /// Parses a record.
    ///
    /// # Errors
    /// When it is malformed, has another version, or claims impossible files.
    pub fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let record: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if record.onehop_system != VERSION {
            return Err(format!("it is of version {}, and this build reads {VERSION}", record.onehop_system));
        }
        for (path, content) in &record.files {
            content.check().map_err(|why| format!("{path}: {why}"))?;
        }
        Ok(record)
    }

    /// Serializes the record as JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serializing maps of strings and numbers cannot fail.
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    pub(crate) fn bytes(&self, path: &str, most: usize) -> Result<Vec<u8>> {
        let path_of = || path.to_owned();
        match self.files.get(path) {
            None | Some(Content::There { .. }) => Err(Error::Missing { path: path_of() }),
            Some(Content::Denied { .. }) => Err(Error::Denied { path: path_of() }),
            Some(Content::Failed { failed }) => {
                Err(Error::Unreadable { path: path_of(), why: failed.clone() })
            }
            Some(content) => {
                let mut bytes = content.bytes();
                bytes.truncate(most);
                Ok(bytes)
            }
        }
    }

    pub(crate) fn link(&self, path: &str) -> Result<String> {
        self.links.get(path).cloned().ok_or_else(|| Error::Missing { path: path.to_owned() })
    }

    pub(crate) fn list(&self, path: &str) -> Result<Vec<String>> {
        let said = self.folders.get(path);
        let mut names: BTreeSet<String> = said.into_iter().flatten().cloned().collect();
        names.extend(self.below(path).map(str::to_owned));
        if said.is_none() && names.is_empty() {
            return Err(Error::Missing { path: path.to_owned() });
        }
        Ok(names.into_iter().filter(|name| !name.contains('/')).collect())
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.files.contains_key(path)
            || self.links.contains_key(path)
            || self.folders.contains_key(path)
            || self.below(path).next().is_some()
    }

    /// Names of files, links and folders directly in a folder.
    fn below<'a>(&'a self, folder: &str) -> impl Iterator<Item = &'a str> {
        let front = format!("{}/", folder.trim_end_matches('/'));
        let from = front.clone();
        let keys = (self.files.range(from.clone()..).map(|(k, _)| k))
            .take_while({
                let front = front.clone();
                move |k| k.starts_with(&front)
            })
            .chain(self.links.range(from.clone()..).map(|(k, _)| k).take_while({
                let front = front.clone();
                move |k| k.starts_with(&front)
            }))
            .chain(self.folders.range(from..).map(|(k, _)| k).take_while({
                let front = front.clone();
                move |k| k.starts_with(&front)
            }));
        keys.filter_map(move |key| key.get(front.len()..)?.split('/').next()).filter(|name| !name.is_empty())
    }

    pub(crate) fn put(&mut self, path: &str, found: &Result<Vec<u8>>) {
        if let Some(content) = Content::of(found) {
            self.files.insert(path.to_owned(), content);
        }
    }

    pub(crate) fn put_list(&mut self, path: &str, found: &Result<Vec<String>>) {
        if let Ok(names) = found {
            self.folders.insert(path.to_owned(), names.clone());
        }
    }

    pub(crate) fn put_link(&mut self, path: &str, found: &Result<String>) {
        if let Ok(target) = found {
            self.links.insert(path.to_owned(), target.clone());
        }
    }

    pub(crate) fn put_presence(&mut self, path: &str, found: bool) {
        if found && !self.exists(path) {
            self.files.insert(path.to_owned(), Content::There { there: true });
        }
    }
}

impl Content {
    /// The contents for some bytes: text if possible.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) if !text.contains('\0') => Self::Text(text.to_owned()),
            _ => Self::Bytes { bytes: bytes.len(), hex: runs(bytes) },
        }
    }

    fn check(&self) -> std::result::Result<(), String> {
        let Self::Bytes { bytes, hex } = self else { return Ok(()) };
        if *bytes > MAX_FILE {
            return Err(format!("{bytes} bytes are more than a record holds"));
        }
        for (at, digits) in hex {
            let fits =
                digits.len() % 2 == 0 && at.checked_add(digits.len() / 2).is_some_and(|end| end <= *bytes);
            if !fits || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(format!("its bytes at {at} are not hexadecimal, or beyond its end"));
            }
        }
        Ok(())
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Text(text) => text.clone().into_bytes(),
            Self::Bytes { bytes, hex } if self.check().is_ok() => {
                let mut all = vec![0; *bytes];
                for (at, digits) in hex {
                    for (place, pair) in all[*at..].iter_mut().zip(digits.as_bytes().chunks(2)) {
                        let pair = std::str::from_utf8(pair).unwrap_or_default();
                        *place = u8::from_str_radix(pair, 16).unwrap_or_default();
                    }
                }
                all
            }
            _ => Vec::new(),
        }
    }
}

/// The non-zero runs.
fn runs(bytes: &[u8]) -> Vec<(usize, String)> {
    let mut runs: Vec<(usize, String)> = Vec::new();
    for (at, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
        let end = |(start, run): &(usize, String)| start + run.len() / 2;
        if runs.last().is_none_or(|last| at >= end(last) + GAP) {
            runs.push((at, String::new()));
        }
        if let Some(last) = runs.last_mut() {
            let from = end(last);
            last.1.extend(bytes[from..=at].iter().map(|byte| format!("{byte:02x}")));
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive() {
        let mut bytes = vec![0_u8; 300];
        bytes[0] = 1;
        bytes[5] = 0xff;
        bytes[40] = 7;
        bytes[255] = 9;
        let content = Content::from_bytes(&bytes);
        assert_eq!(content.bytes(), bytes);
        let Content::Bytes { hex, .. } = &content else { panic!("{content:?}") };
        assert_eq!(hex.iter().map(|run| run.0).collect::<Vec<_>>(), [0, 40, 255]);
        assert_eq!(hex[0].1, "0100000000ff");
        assert_eq!(Content::from_bytes(&[0; 64]).bytes(), [0; 64]);
    }

    #[test]
    fn folders_follow_from_what_is_in_them() {
        let mut record = Record::new();
        record.put("/sys/a/b/c", &Ok(b"1".to_vec()));
        record.put_link("/sys/a/l", &Ok("b".into()));
        record.put_list("/sys/a", &Ok(vec!["z".into()]));
        assert_eq!(record.list("/sys/a").unwrap(), ["b", "l", "z"]);
        assert_eq!(record.list("/sys").unwrap(), ["a"]);
        assert!(record.exists("/sys/a/b") && !record.exists("/sys/a/bb") && record.list("/sy").is_err());
    }

    #[test]
    fn records_of_strangers_are_refused() {
        let refused = |text: &str| Record::parse(text.as_bytes()).unwrap_err();
        refused("");
        refused("{}");
        assert!(refused(r#"{"onehop_system":2}"#).contains("version 2"));
        refused(r#"{"onehop_system":1,"files":{"/a":{"bytes":99999999999,"hex":[]}}}"#);
        refused(r#"{"onehop_system":1,"files":{"/a":{"bytes":4,"hex":[[3,"0102"]]}}}"#);
        refused(r#"{"onehop_system":1,"files":{"/a":{"bytes":4,"hex":[[18446744073709551615,"01"]]}}}"#);
        refused(r#"{"onehop_system":1,"files":{"/a":{"bytes":4,"hex":[[0,"zz"]]}}}"#);
        refused(r#"{"onehop_system":1,"unheard":1}"#);
    }
}
