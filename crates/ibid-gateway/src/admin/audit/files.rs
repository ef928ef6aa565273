//! The files of the trail: JSON lines, appended and synced. Bound: two files of [`MAX_FILE_BYTES`].

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use ibid_stores::ProcessLock;
use serde::Serialize;

/// Maximum size of one file; there are two.
pub(super) const MAX_FILE_BYTES: u64 = 4 << 20;
/// Maximum number of bytes read from a file that another program made longer.
const MAX_READ_BYTES: u64 = 2 * MAX_FILE_BYTES;

#[derive(Debug)]
pub(super) struct AuditFiles {
    /// Held as long as the trail is open.
    _lock: ProcessLock,
    path: PathBuf,
    pub(super) file: File,
    length: u64,
}

impl AuditFiles {
    /// Locks the trail for this process, and creates the folder and the file if they are missing.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let lock = ProcessLock::acquire(&with_suffix(path, ".lock")).map_err(|why| match why.kind() {
            io::ErrorKind::WouldBlock => {
                let what = format!("{why}; each gateway writes to a file of its own, so name another");
                io::Error::new(io::ErrorKind::WouldBlock, what)
            }
            _ => why,
        })?;
        let (file, length) = open_for_append(path)?;
        Ok(Self { _lock: lock, path: path.into(), file, length })
    }

    /// Appends a line. Returns whether the file was full and was rotated, even if the append then fails.
    pub(super) fn write(&mut self, line: &impl Serialize) -> (bool, io::Result<()>) {
        let mut bytes = match serde_json::to_vec(line) {
            Ok(bytes) => bytes,
            Err(why) => return (false, Err(why.into())),
        };
        bytes.push(b'\n');
        let full = self.length > 0 && self.length + bytes.len() as u64 > MAX_FILE_BYTES;
        match if full { self.rotate() } else { Ok(()) } {
            Ok(()) => (full, self.append(&bytes)),
            Err(why) => (false, Err(why)),
        }
    }

    fn rotate(&mut self) -> io::Result<()> {
        match fs::rename(&self.path, older_path(&self.path)) {
            // An earlier rotation renamed the file and then failed to create the new one.
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            turned => turned?,
        }
        (self.file, self.length) = open_for_append(&self.path)?;
        Ok(())
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(line).and_then(|()| self.file.sync_data());
        match written {
            Ok(()) => self.length += line.len() as u64,
            // A partial line would corrupt the next one.
            Err(_) => self.file.set_len(self.length)?,
        }
        written
    }
}

pub(super) fn older_path(path: &Path) -> PathBuf {
    with_suffix(path, ".1")
}

/// Reads a file; empty if it does not exist.
pub(super) fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(MAX_READ_BYTES).read_to_end(&mut text)?,
        Err(why) if why.kind() == io::ErrorKind::NotFound => 0,
        Err(why) => return Err(why),
    };
    Ok(text)
}

fn with_suffix(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Opens a file for appending and returns its length. Only its owner may read it.
fn open_for_append(path: &Path) -> io::Result<(File, u64)> {
    let mut file = OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path)?;
    let mut length = file.metadata()?.len();
    if length > 0 && !ends_with_newline(&file, length)? {
        // Ends the partial line that a killed process left.
        file.write_all(b"\n")?;
        length += 1;
    }
    file.sync_all()?;
    sync_folder(path)?;
    Ok((file, length))
}

fn ends_with_newline(file: &File, length: u64) -> io::Result<bool> {
    let mut last = [0];
    file.read_exact_at(&mut last, length - 1)?;
    Ok(last == *b"\n")
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
