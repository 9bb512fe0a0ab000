//! A program's configuration: cufile.json and environment variables.

use serde_json::Value;

use crate::log::{Level, say};
use crate::parameters::{Bool, Parameters, SizeParameter};

/// The configuration file, unless `CUFILE_ENV_PATH_JSON` names another.
const USUAL: &str = "/etc/cufile.json";
/// Larger files are not read.
const LONGEST: u64 = 1 << 20;

/// Numbers of the configuration that are used.
const SIZES: [(&str, SizeParameter); 11] = [
    ("/profile/cufile_stats", SizeParameter::Stats),
    ("/execution/max_io_queue_depth", SizeParameter::QueueDepth),
    ("/execution/max_io_threads", SizeParameter::Threads),
    ("/execution/min_io_threshold_size_kb", SizeParameter::MinThreshold),
    ("/execution/max_request_parallelism", SizeParameter::Parallelism),
    ("/properties/max_direct_io_size_kb", SizeParameter::MaxDirectIo),
    ("/properties/max_device_cache_size_kb", SizeParameter::MaxCache),
    ("/properties/per_buffer_cache_size_kb", SizeParameter::PerBufferCache),
    ("/properties/max_device_pinned_mem_size_kb", SizeParameter::MaxPinned),
    ("/properties/io_batchsize", SizeParameter::Batch),
    ("/properties/poll_thresh_size_kb", SizeParameter::PollThreshold),
];
const BOOLS: [(&str, Bool); 3] = [
    ("/properties/use_poll_mode", Bool::Poll),
    ("/properties/allow_compat_mode", Bool::AllowCompat),
    ("/properties/force_compat_mode", Bool::ForceCompat),
];

/// A process's initial parameters.
pub fn read() -> Parameters {
    let mut parameters = Parameters::default();
    let named = std::env::var_os("CUFILE_ENV_PATH_JSON").filter(|path| !path.is_empty());
    let path = named.clone().unwrap_or_else(|| USUAL.into());
    match load(path.as_ref()) {
        Ok(config) => apply(&config, &mut parameters),
        Err(why) if named.is_some() => {
            say(Level::Error, &format!("{}: {why}; the defaults hold", path.to_string_lossy()));
        }
        Err(_) => {}
    }
    if let Some(level) = std::env::var("CUFILE_STATS_LEVEL").ok().and_then(|text| text.parse().ok()) {
        let _ = parameters.set_size(SizeParameter::Stats, level);
    }
    parameters
}

fn load(path: &std::path::Path) -> Result<Value, String> {
    let length = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > LONGEST {
        return Err(format!("{length} bytes are too long for a configuration"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    serde_json::from_str(&without_comments(&text)).map_err(|error| error.to_string())
}

/// The text without `//` comments, which JSON does not have but this file does.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let (mut quoted, mut escaped, mut end) = (false, false, line.len());
        for (at, byte) in line.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if quoted => escaped = true,
                b'"' => quoted = !quoted,
                b'/' if !quoted && line[at..].starts_with("//") => {
                    end = at;
                    break;
                }
                _ => {}
            }
        }
        out.push_str(&line[..end]);
        out.push('\n');
    }
    out
}

fn apply(config: &Value, parameters: &mut Parameters) {
    for (name, which) in SIZES {
        let value =
            config.pointer(name).and_then(Value::as_u64).and_then(|value| usize::try_from(value).ok());
        if let Some(value) = value
            && parameters.set_size(which, value).is_err()
        {
            say(Level::Warning, &format!("cufile.json: {name} = {value} is out of bounds, and ignored"));
        }
    }
    for (name, which) in BOOLS {
        if let Some(value) = config.pointer(name).and_then(Value::as_bool) {
            parameters.set_bool(which, value);
        }
    }
    let known =
        |name: &str| SIZES.iter().any(|(known, _)| *known == name) || BOOLS.iter().any(|(k, _)| *k == name);
    for (section, values) in config.as_object().into_iter().flatten() {
        for key in values.as_object().into_iter().flatten().map(|(key, _)| key) {
            let name = format!("/{section}/{key}");
            if !known(&name) {
                say(Level::Info, &format!("cufile.json: {name} has no effect in onehop"));
            }
        }
    }
}

/// The version of nvidia-fs that is reported to programs: none is used, but `ONEHOP_CUFILE_NVFS=2.17` reports one to
/// programs that require it.
pub fn nvfs_version() -> (u32, u32) {
    let text = std::env::var("ONEHOP_CUFILE_NVFS").unwrap_or_default();
    let (major, minor) = text.split_once('.').unwrap_or((&text, "0"));
    (major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_go_and_texts_stay() {
        let text = "{ // one\n \"a//b\": \"c\\\"//d\", // two\n \"e\": 1 }";
        let value: Value = serde_json::from_str(&without_comments(text)).unwrap();
        assert_eq!(value, serde_json::json!({ "a//b": "c\"//d", "e": 1 }));
    }

    #[test]
    fn what_is_out_of_bounds_is_ignored() {
        let mut parameters = Parameters::default();
        let config = serde_json::json!({
            "properties": { "io_batchsize": 9999, "poll_thresh_size_kb": 64, "allow_compat_mode": false },
            "execution": { "max_io_threads": "many" },
        });
        apply(&config, &mut parameters);
        assert_eq!(parameters.size(SizeParameter::Batch), 128);
        assert_eq!(parameters.size(SizeParameter::PollThreshold), 64);
        assert!(!parameters.bool(Bool::AllowCompat));
    }
}
