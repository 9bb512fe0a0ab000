//! On the host: what the guest said that lies in the files behind the drive and the VRAM has to lie there.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::report::{Failed, ensure};

/// Looks at every line of a guest's log that asks for it.
pub(crate) fn run(log: &str, vram: &str, disk: &str) -> Result<(), Failed> {
    let log = std::fs::read_to_string(log)?;
    let (vram, disk) = (File::open(vram)?, File::open(disk)?);
    for line in log.lines().filter(|line| line.starts_with("CHECK ")) {
        let file = if line.contains(" vram ") { &vram } else { &disk };
        match look(line, file) {
            Ok(()) => println!("PASS host: {}", &line[6..]),
            Err(Failed(why)) => println!("FAIL host: {}: {why}", &line[6..]),
        }
    }
    Ok(())
}

fn look(line: &str, file: &File) -> Result<(), Failed> {
    let words: Vec<_> = line.split_whitespace().collect();
    let [_, _, offset, bytes, sum] = words[..] else { return Err("this is no line of ours".into()) };
    let mut got = vec![0; bytes.parse()?];
    file.read_exact_at(&mut got, offset.parse()?)?;
    let found = format!("{:08x}", crc32c::crc32c(&got));
    ensure(found == sum, || format!("the file's bytes have the sum {found}"))
}
