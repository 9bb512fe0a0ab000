//! Models on disk: indexes, directories, split files; and everything else that a path may lead to.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use onehop_load::formats::index::Error as IndexError;
use onehop_load::model::Error as ModelError;
use onehop_load::{Change, Error, Kind, Local, LocalFile, Model, Result, Source, Store};

use crate::common::{Dir, safetensors};
use crate::gguf::Gguf;

/// Opens a path, and fails if that takes long: opening must not block.
fn open(path: impl Into<PathBuf>) -> Result<Model> {
    let path = path.into();
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(Model::open(&Local, &[path])));
    wait.recv_timeout(Duration::from_secs(20)).unwrap()
}

fn refused(path: impl Into<PathBuf>) -> Error {
    match open(path) {
        Ok(model) => panic!("{} tensors", model.tensors.len()),
        Err(error) => error,
    }
}

/// A file of one-byte tensors.
fn shard(names: &[&str]) -> Vec<u8> {
    let entry = |(i, name): (usize, &&str)| {
        format!(r#""{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1)
    };
    let entries: Vec<_> = names.iter().enumerate().map(entry).collect();
    safetensors(&format!("{{{}}}", entries.join(",")), names.len())
}

fn index(map: &[(&str, &str)]) -> String {
    let entries: Vec<_> = map.iter().map(|(tensor, file)| format!("{tensor:?}:{file:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":3}},"weight_map":{{{}}}}}"#, entries.join(","))
}

fn part(no: u16, count: u16, tensor: &str) -> Vec<u8> {
    Gguf::default()
        .key("split.no", 2, &no.to_le_bytes())
        .key("split.count", 2, &count.to_le_bytes())
        .key("split.tensors.count", 5, &i32::from(count).to_le_bytes())
        .tensor(tensor, &[8], 0, 0)
        .file(32, 32)
}

fn names(model: &Model) -> Vec<&str> {
    model.tensors.iter().map(|t| t.info.name.as_str()).collect()
}

#[test]
fn a_directory_with_an_index() {
    let dir = Dir::new();
    dir.write("a.safetensors", shard(&["x", "y"]));
    dir.write("b.safetensors", shard(&["z"]));
    dir.write("consolidated.safetensors", shard(&["x", "y", "z"]));
    dir.write("pytorch_model.bin.index.json", "not ours");
    dir.write("config.json", "{}");
    let path = dir.write(
        "model.safetensors.index.json",
        index(&[("z", "b.safetensors"), ("x", "a.safetensors"), ("y", "a.safetensors")]),
    );
    for path in [path, dir.path().into()] {
        let model = open(path).unwrap();
        assert_eq!((names(&model), model.files.len(), model.format), (vec!["x", "y", "z"], 2, "safetensors"));
        assert_eq!(model.bytes(), 3);
        assert!(
            model.files.iter().all(|f| f.local().is_some_and(|l| Some(l.path()) == Some(f.name().as_ref())))
        );
        assert!(model.still_same().unwrap().is_empty());
    }
}

#[test]
fn a_directory_without_an_index() {
    let dir = Dir::new();
    assert!(matches!(refused(dir.path()), Error::Model(ModelError::Empty { .. })));
    dir.write("q8.gguf", part(0, 1, "t"));
    assert_eq!(open(dir.path()).unwrap().format, "gguf");
    dir.write("q4.gguf", part(0, 1, "t"));
    assert!(
        matches!(refused(dir.path()), Error::Model(ModelError::Several { names, .. }) if names.len() == 2)
    );
    dir.write("part1.safetensors", shard(&["a"]));
    dir.write("part10.safetensors", shard(&["b"]));
    dir.write(".hidden.safetensors", "not ours");
    assert_eq!(names(&open(dir.path()).unwrap()), ["a", "b"]);
    dir.write("part2.safetensors", shard(&["b"]));
    assert!(
        matches!(refused(dir.path()), Error::Model(ModelError::TwoFiles { tensor, .. }) if tensor == "b")
    );
}

/// Files that model hubs and trainers put into one directory, and the choices that the error offers.
#[test]
fn files_that_need_not_belong_together_are_refused() {
    let says = |files: &[&str], choices: &[&str]| {
        let dir = Dir::new();
        for (i, name) in files.iter().enumerate() {
            dir.write(name, shard(&[&format!("t{i}")]));
        }
        let why = refused(dir.path());
        let Error::Model(ModelError::Apart { choices: found, .. }) = &why else { panic!("{why}") };
        assert_eq!(found, choices);
        assert!(choices.iter().all(|choice| why.to_string().contains(choice)), "{why}");
        // Files that the caller names are taken as one model.
        let paths: Vec<_> = files.iter().map(|name| dir.path().join(name)).collect();
        assert_eq!(Model::open(&Local, &paths).unwrap().tensors.len(), files.len());
    };
    for other in
        ["consolidated.safetensors", "adapter_model.safetensors", "optimizer.safetensors", "x.safetensors"]
    {
        let mut files = [other, "model.safetensors"];
        files.sort_unstable();
        says(&files, &files);
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let mut choices = [other, "model-*-of-00002.safetensors"];
        choices.sort_unstable();
        says(&[&[other][..], &shards].concat(), &choices);
    }
    says(&["a1.safetensors", "a2.safetensors", "b.safetensors"], &["a*.safetensors", "b.safetensors"]);
    says(
        &["m-00001-of-00001.safetensors", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
        &["m-*-of-00002.safetensors", "m-00001-of-00001.safetensors"],
    );
    // A single file is the model, under any name.
    let dir = Dir::new();
    dir.write("adapter_model.safetensors", shard(&["a"]));
    assert_eq!(names(&open(dir.path()).unwrap()), ["a"]);
}

#[test]
fn an_index_of_other_files_is_refused() {
    let dir = Dir::new();
    let map = index(&[("a", "consolidated-1.safetensors"), ("b", "consolidated-2.safetensors")]);
    let path = dir.write("consolidated.safetensors.index.json", map);
    dir.write("consolidated-1.safetensors", shard(&["a"]));
    dir.write("consolidated-2.safetensors", shard(&["b"]));
    assert_eq!(names(&open(dir.path()).unwrap()), ["a", "b"]);
    dir.write("model.safetensors", shard(&["c"]));
    let why = refused(dir.path());
    assert!(
        matches!(&why, Error::Model(ModelError::Apart { choices, .. }) if *choices == ["consolidated.safetensors.index.json", "model.safetensors"]),
        "{why}"
    );
    assert_eq!(names(&open(path).unwrap()), ["a", "b"]);
    assert_eq!(names(&open(dir.path().join("model.safetensors")).unwrap()), ["c"]);
}

/// Without an index, only names show that a part of a model is missing.
#[test]
fn a_directory_with_a_shard_too_few() {
    let dir = Dir::new();
    dir.write("model-00001-of-00003.safetensors", shard(&["a"]));
    dir.write("model-00003-of-00003.safetensors", shard(&["c"]));
    let why = refused(dir.path()).to_string();
    assert!(why.contains("split into 3 parts") && why.contains("model-00002-of-00003.safetensors"), "{why}");
    dir.write("model-00002-of-00003.safetensors", shard(&["b"]));
    assert_eq!(names(&open(dir.path()).unwrap()), ["a", "b", "c"]);
    // A file that is named is opened.
    assert_eq!(names(&open(dir.path().join("model-00002-of-00003.safetensors")).unwrap()), ["b"]);
    // Names may be any bytes.
    let dir = Dir::new();
    fs::write(dir.path().join(OsStr::from_bytes(b"m\xff.safetensors")), shard(&["e"])).unwrap();
    assert_eq!(names(&open(dir.path()).unwrap()), ["e"]);
}

#[test]
fn directories_that_hold_something_else() {
    let says = |names: &[&str], what: &str| {
        let dir = Dir::new();
        names.iter().for_each(|name| drop(dir.write(name, "{}")));
        let why = refused(dir.path());
        assert!(
            matches!(why, Error::Model(ModelError::Empty { .. })) && why.to_string().contains(what),
            "{why}"
        );
    };
    says(
        &["config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
        "00002.bin and its like",
    );
    says(&["model_index.json", "unet/diffusion_pytorch_model.safetensors"], "name a directory in it");
    says(&["blobs/0123", "snapshots/4567/model.safetensors", "refs/main"], "in its snapshots");
    says(&["config.json", "model.safetensors.incomplete"], "no *.gguf");
}

#[test]
fn split_files() {
    let dir = Dir::new();
    for no in 0..3 {
        dir.write(&format!("m-0000{}-of-00003.gguf", no + 1), part(no, 3, &format!("t{no}")));
    }
    for path in [dir.path().to_owned(), dir.path().join("m-00002-of-00003.gguf")] {
        assert_eq!(names(&open(path).unwrap()), ["t0", "t1", "t2"]);
    }
    let more = Gguf::default()
        .key("split.no", 2, &2u16.to_le_bytes())
        .key("split.count", 2, &3u16.to_le_bytes())
        .tensor("t2", &[8], 0, 0)
        .tensor("t3", &[8], 0, 32);
    dir.write("m-00003-of-00003.gguf", more.file(32, 64));
    let why = refused(dir.path());
    assert!(matches!(why, Error::Model(ModelError::TensorsMissing { found: 4, .. })), "{why}");
    dir.write("m-00003-of-00003.gguf", part(1, 3, "t2"));
    assert!(matches!(refused(dir.path()), Error::Model(ModelError::WrongPart { no: 2, count: 3, .. })));
    dir.write("m-00003-of-00003.gguf", Gguf::default().file(32, 0));
    assert!(matches!(refused(dir.path()), Error::Model(ModelError::WrongPart { said: (None, None), .. })));
    dir.write("m-00003-of-00003.gguf", shard(&["t2"]));
    assert!(matches!(refused(dir.path()), Error::Model(ModelError::NoGguf { .. })));
    // A negative count, in a part that is not the first.
    let negative = Gguf::default()
        .key("split.no", 2, &2u16.to_le_bytes())
        .key("split.count", 2, &3u16.to_le_bytes())
        .key("split.tensors.count", 5, &(-3i32).to_le_bytes())
        .tensor("t2", &[8], 0, 0);
    dir.write("m-00003-of-00003.gguf", negative.file(32, 32));
    let why = refused(dir.path());
    assert!(
        matches!(&why, Error::Model(ModelError::TensorsMissing { said, .. }) if said == "I32(-3)"),
        "{why}"
    );
    fs::rename(dir.path().join("m-00002-of-00003.gguf"), dir.path().join("renamed.gguf")).unwrap();
    let why = refused(dir.path().join("renamed.gguf"));
    assert!(matches!(why, Error::Model(ModelError::LonePart { count: 3, .. })), "{why}");
    fs::rename(dir.path().join("renamed.gguf"), dir.path().join("m-00002-of-00003.gguf")).unwrap();
    fs::remove_file(dir.path().join("m-00003-of-00003.gguf")).unwrap();
    assert!(matches!(refused(dir.path()), Error::Model(ModelError::MissingPart { count: 3, .. })));
}

#[test]
fn several_files_are_one_model() {
    let dir = Dir::new();
    let one = dir.write("one", shard(&["a"]));
    let two = dir.write("two", shard(&["b"]));
    let gguf = dir.write("three", part(0, 1, "c"));
    let open =
        |paths: &[&PathBuf]| Model::open(&Local, &paths.iter().map(|p| (*p).clone()).collect::<Vec<_>>());
    assert_eq!(names(&open(&[&two, &one]).unwrap()), ["b", "a"]);
    assert!(matches!(open(&[&one, &one]), Err(Error::Model(ModelError::TwoFiles { .. }))));
    assert!(matches!(open(&[&one, &gguf]), Err(Error::Model(ModelError::Mixed { other: "gguf", .. }))));
    assert!(matches!(open(&[]), Err(Error::Model(ModelError::Nothing))));
}

#[test]
fn indexes_that_lie() {
    let dir = Dir::new();
    dir.write("a.safetensors", shard(&["x", "y"]));
    dir.write("b.safetensors", shard(&["z"]));
    dir.write("c.safetensors", shard(&["z", "w"]));
    let refused = |text: &str| match refused(dir.write("model.safetensors.index.json", text)) {
        Error::Index { why, .. } => why,
        other => panic!("{other}"),
    };
    let map = |map| refused(&index(map));
    assert!(matches!(
        map(&[("x", "a.safetensors"), ("y", "b.safetensors")]),
        IndexError::NotInShard { tensor, found: Some(found), .. } if tensor == "y" && found == "a.safetensors"
    ));
    assert!(matches!(map(&[("q", "a.safetensors")]), IndexError::NotInShard { found: None, .. }));
    assert!(
        matches!(map(&[("x", "gone.safetensors")]), IndexError::MissingShard { shard, .. } if shard == "gone.safetensors")
    );
    for shard in
        ["../a.safetensors", "/etc/passwd", "sub/../../a", "..", "./a.safetensors", "", "a//b", "a\0b"]
    {
        let text = serde_json::json!({"weight_map": {"x": shard}}).to_string();
        assert!(matches!(refused(&text), IndexError::Escape { .. }), "{shard}");
    }
    assert!(matches!(refused("{}"), IndexError::NoMap));
    assert!(matches!(refused(r#"{"weight_map":{}}"#), IndexError::Empty));
    assert!(matches!(refused(r#"{"weight_map":{"a":"b"},"weight_map":{}}"#), IndexError::MapTwice));
    assert!(matches!(refused(r#"{"weight_map":{"a":"b","a":"c"}}"#), IndexError::Twice(_)));
    let deep = "[".repeat(1_000_000);
    for text in
        ["", "[]", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#, r#"{"weight_map":{"a":null}}"#, &deep]
    {
        assert!(matches!(refused(text), IndexError::Json(_)), "{text:.40}");
    }
    assert!(matches!(refused(&format!(r#"{{"metadata":{deep}"#)), IndexError::Json(_)));
    // A tensor in two of the index's shards, no matter which of them the index names.
    let text = index(&[("x", "a.safetensors"), ("z", "b.safetensors"), ("w", "c.safetensors")]);
    let why = crate::model::refused(dir.write("model.safetensors.index.json", text));
    assert!(matches!(why, Error::Model(ModelError::TwoFiles { tensor, .. }) if tensor == "z"));
}

#[test]
fn paths_that_are_not_files() {
    let dir = Dir::new();
    let at = |name: &str| dir.path().join(name);
    assert!(matches!(refused(at("gone")), Error::Open { .. }));
    symlink("loop-b", at("loop-a")).unwrap();
    symlink("loop-a", at("loop-b")).unwrap();
    assert!(matches!(refused(at("loop-a")), Error::Loop { .. }));
    symlink("gone", at("dangling")).unwrap();
    assert!(matches!(refused(at("dangling")), Error::Open { .. }));
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    symlink("/dev/zero", at("zero")).unwrap();
    let kind = |path: PathBuf| match refused(path) {
        Error::NotRegular { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(kind(at("fifo")), "a FIFO");
    assert_eq!(kind(at("socket")), "a socket");
    assert_eq!(kind(at("zero")), "a character device");
    // Its length is 0, but it is not empty.
    assert_eq!(kind("/proc/self/status".into()), "made up by the kernel as it is read");
    // As a shard of an index, which must name a file.
    for (name, what) in [("fifo", "a FIFO"), ("directory", "a directory"), ("zero", "a character device")] {
        let path = dir.write("model.safetensors.index.json", index(&[("x", name)]));
        let Error::Index { why: IndexError::MissingShard { why, .. }, .. } = refused(path) else {
            panic!("{name}")
        };
        assert!(matches!(*why, Error::NotRegular { what: w, .. } if w == what), "{why}");
    }
    let path = dir.write("model.safetensors.index.json", index(&[("x", "loop-a")]));
    assert!(matches!(
        refused(path),
        Error::Index { why: IndexError::MissingShard { why, .. }, .. } if matches!(*why, Error::Loop { .. })
    ));
}

/// Shards may be links, as in the cache of a model hub.
#[test]
fn links_to_files_are_followed() {
    let dir = Dir::new();
    let blob = dir.write("blobs/1234", shard(&["x"]));
    fs::create_dir(dir.path().join("snapshot")).unwrap();
    symlink(blob, dir.path().join("snapshot/a.safetensors")).unwrap();
    assert_eq!(names(&open(dir.path().join("snapshot")).unwrap()), ["x"]);
}

/// Opens a model, changes its file, and returns what was detected.
fn after(happens: impl Fn(&PathBuf)) -> (Dir, Result<Vec<String>>) {
    let dir = Dir::new();
    let path = dir.write("m.safetensors", shard(&["x", "y"]));
    // At once: opening waits until later writes have another time.
    let model = open(&path).unwrap();
    happens(&path);
    let noticed = model.still_same();
    (dir, noticed)
}

#[test]
fn bytes_that_change_are_an_error() {
    let bytes = shard(&["x", "y"]);
    let length = bytes.len() as u64;
    let changed = |happens: &dyn Fn(&PathBuf)| match after(happens).1 {
        Err(Error::Changed { change, .. }) => change,
        other => panic!("{other:?}"),
    };
    let truncate = |p: &PathBuf, to| fs::OpenOptions::new().write(true).open(p).unwrap().set_len(to).unwrap();
    let unlink = |p: &PathBuf| fs::remove_file(p).unwrap();
    assert_eq!(changed(&|p| fs::write(p, &bytes).unwrap()), Change::Written);
    assert_eq!(changed(&|p| truncate(p, 9)), Change::Shrunk(length, 9));
    assert_eq!(changed(&|p| truncate(p, 999)), Change::Grew(length, 999));
    // A change of the name must not hide it.
    let both = |p: &PathBuf| {
        truncate(p, 9);
        unlink(p);
    };
    assert_eq!(changed(&both), Change::Shrunk(length, 9));
}

/// The bytes of an open file outlive its names, and do not depend on its attributes.
#[test]
fn changes_of_attributes_are_a_warning() {
    let bytes = shard(&["x", "y"]);
    let warned = |says: &str, happens: &dyn Fn(&PathBuf)| {
        let (dir, noticed) = after(happens);
        let lines = noticed.unwrap();
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with(dir.path().to_str().unwrap()) && line.contains(says), "{line}");
    };
    let beside = |p: &PathBuf| p.with_file_name("beside");
    warned("links were changed", &|p| fs::hard_link(p, beside(p)).unwrap());
    warned("attributes", &|p| fs::set_permissions(p, fs::Permissions::from_mode(0o640)).unwrap());
    warned("it was removed", &|p| fs::remove_file(p).unwrap());
    warned("it was removed", &|p| fs::rename(p, beside(p)).unwrap());
    warned("another file", &|p| {
        fs::write(beside(p), &bytes).unwrap();
        fs::rename(beside(p), p).unwrap();
    });
    warned("can no longer be followed", &|p| {
        fs::remove_file(p).unwrap();
        symlink(p, p).unwrap();
    });
    // A writer that resets the time is detected, though only as a change of attributes.
    warned("attributes", &|p| {
        let time = fs::metadata(p).unwrap().modified().unwrap();
        fs::write(p, &bytes).unwrap();
        fs::OpenOptions::new().write(true).open(p).unwrap().set_modified(time).unwrap();
    });
}

/// A shard that is replaced while the others are opened is of another version of the model.
#[test]
fn shards_of_two_versions_are_refused() {
    struct Replacing(PathBuf);
    impl Store for Replacing {
        fn kind(&self, path: &Path) -> Result<Kind> {
            Local.kind(path)
        }
        fn names(&self, path: &Path) -> Result<Vec<OsString>> {
            Local.names(path)
        }
        fn open(&self, path: &Path) -> Result<Box<dyn Source>> {
            let opened = Local.open(path);
            if path == self.0 {
                let new = path.with_extension("new");
                fs::copy(path, &new).unwrap();
                fs::rename(new, path).unwrap();
            }
            opened
        }
    }
    let dir = Dir::new();
    let [a, b] = ["1.safetensors", "2.safetensors"].map(|name| dir.write(name, shard(&[name])));
    let path = [dir.path().to_owned()];
    for replaced in [a, b] {
        let refused = Model::open(&Replacing(replaced), &path).err().unwrap();
        assert!(matches!(refused, Error::Changed { change: Change::Replaced(..), .. }), "{refused}");
    }
    assert!(Model::open(&Local, &path).is_ok());
}

#[test]
fn a_file_that_shrinks_while_it_is_read() {
    let dir = Dir::new();
    let path = dir.write("m.safetensors", shard(&["x"]));
    let file = LocalFile::open(&path).unwrap();
    fs::write(&path, "short").unwrap();
    let mut buffer = [0; 16];
    assert!(
        matches!(file.read_at(0, &mut buffer), Err(Error::Ended { length, .. }) if length == file.bytes())
    );
    assert!(matches!(onehop_load::formats::Contents::read(&file), Err(Error::Ended { .. })));
    assert!(file.still_same().is_err());
}

#[test]
fn files_that_are_not_models() {
    let dir = Dir::new();
    let safetensors = |bytes: &[u8]| matches!(refused(dir.write("m", bytes)), Error::Safetensors { .. });
    assert!(safetensors(b""));
    assert!(safetensors(b"GGU"));
    let kinds: [(&[u8], &str); 4] = [
        (b"PK\x03\x04 a pickle of torch, in a zip", "a ZIP archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"{\"error\":\"no access\"}", "JSON"),
    ];
    for (bytes, what) in kinds {
        let why = refused(dir.write("m", bytes));
        assert!(matches!(why, Error::Safetensors { .. }) && why.to_string().contains(what), "{why}");
    }
    assert!(matches!(refused(dir.write("m", b"GGUF")), Error::Gguf { .. }));
    // A header that is too long for the file must not be allocated; a sparse file shows that its length means little.
    let sparse = dir.write("m", (1u64 << 40).to_le_bytes());
    fs::OpenOptions::new().write(true).open(&sparse).unwrap().set_len(1 << 42).unwrap();
    assert!(matches!(refused(sparse), Error::Safetensors { .. }));
    let index = dir.write("big.index.json", "");
    fs::OpenOptions::new().write(true).open(&index).unwrap().set_len(1 << 40).unwrap();
    assert!(matches!(refused(index), Error::TooLong { .. }));
}
