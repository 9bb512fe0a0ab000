//! Draws a spectrum as a PNG: one column per bin, levels as a line.

use std::io::BufWriter;
use std::path::Path;

use crate::error::{CliError, Result};
use crate::outputs;

const HEIGHT: usize = 400;
const BACK: [u8; 3] = [16, 18, 24];
const GRID: [u8; 3] = [48, 52, 64];
const LINE: [u8; 3] = [96, 208, 255];

/// Writes the picture. It spans 0 dBFS at the top to -120 dBFS at the bottom, with a grid line every 10 dB.
pub(super) fn write(path: &Path, spectrum: &[f64]) -> Result<()> {
    let width = spectrum.len();
    let pixels = draw(spectrum);
    let file = outputs::create(path)?;
    let mut encoder = png::Encoder::new(BufWriter::new(file), width as u32, HEIGHT as u32);
    encoder.set_color(png::ColorType::Rgb);
    let failed = |e: png::EncodingError| CliError::Failed(format!("writing {}: {e}", path.display()));
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&pixels).map_err(failed)?;
    writer.finish().map_err(failed)
}

fn row_of(level: f64) -> usize {
    ((-level / 120.0).clamp(0.0, 1.0) * (HEIGHT - 1) as f64) as usize
}

fn draw(spectrum: &[f64]) -> Vec<u8> {
    let width = spectrum.len();
    let mut pixels = BACK.repeat(width * HEIGHT);
    for level in (0..=120).step_by(10) {
        let at = row_of(-f64::from(level)) * width * 3;
        pixels[at..at + width * 3].copy_from_slice(&GRID.repeat(width));
    }
    let mut previous = spectrum.first().map_or(0, |level| row_of(*level));
    for (column, level) in spectrum.iter().enumerate() {
        let row = row_of(*level);
        for row in previous.min(row)..=previous.max(row) {
            let at = (row * width + column) * 3;
            pixels[at..at + 3].copy_from_slice(&LINE);
        }
        previous = row;
    }
    pixels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_picture_can_be_decoded() {
        let path = std::env::temp_dir().join(format!("onehop-spectrum-{}.png", std::process::id()));
        let mut spectrum = vec![-80.0; 256];
        spectrum[100] = 0.0;
        write(&path, &spectrum).unwrap();
        let file = std::io::BufReader::new(std::fs::File::open(&path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((info.width, info.height), (256, HEIGHT as u32));
        assert_eq!(pixels[100 * 3..101 * 3], LINE);
        assert_eq!(pixels[50 * 3..51 * 3], GRID);
    }
}
