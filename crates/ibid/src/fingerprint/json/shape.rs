//! Shapes: the names of objects that were read before.
//!
//! The objects of an array mostly have the same names in the same order, and so do the requests of one client. An object
//! of a known shape is read by comparing each name as a whole, and its members are already in order: that takes a third
//! of the time.
//!
//! Example: `{"sku":"a","price":1}` has the shape `{"sku":_,"price":_}`, whose sorted order is `price`, `sku`.

use super::document::JsonSpan;

/// The maximum number of members of a shape.
pub(super) const MAX_SHAPE_MEMBERS: usize = 16;
/// The maximum length of a name with what surrounds it: `,"name":`.
const MAX_NAME_BYTES: usize = 16;
/// Objects from this depth on share their shapes with those of a lower depth.
const SHAPE_DEPTHS: usize = 8;
/// The maximum number of shapes that are learned from one document, so that documents without repetition stay cheap.
const MAX_LEARNED: usize = 8;

/// The names of an object of scalars, in the order of the source, without any space.
#[derive(Clone, Copy)]
pub(super) struct ObjectShape {
    names: [ShapeName; MAX_SHAPE_MEMBERS],
    /// The index of each member, in canonical order.
    sorted: [u8; MAX_SHAPE_MEMBERS],
    len: usize,
    pub(super) is_sorted: bool,
}

/// A name, with the byte before it and the colon after it.
#[derive(Clone, Copy)]
pub(super) struct ShapeName {
    /// As numbers whose low byte is the first. Two, because the compiler compares one of 128 bits in a vector register,
    /// which takes longer.
    text: [u64; 2],
    /// The bits that are compared.
    mask: [u64; 2],
    size: u32,
}

impl ShapeName {
    fn new(text: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_NAME_BYTES];
        bytes.get_mut(..text.len())?.copy_from_slice(text);
        let mask = u128::MAX >> (8 * (MAX_NAME_BYTES - text.len()));
        let mask = [mask as u64, (mask >> 64) as u64];
        Some(Self { text: words(&bytes), mask, size: text.len() as u32 })
    }

    /// The end of this text, if the body has it at a position.
    #[inline(always)]
    pub(super) fn end_at(&self, body: &[u8], pos: u32) -> Option<u32> {
        let found = body.get(pos as usize..pos as usize + MAX_NAME_BYTES)?.first_chunk()?;
        let [low, high] = words(found);
        (low & self.mask[0] == self.text[0] && high & self.mask[1] == self.text[1]).then(|| pos + self.size)
    }
}

#[inline(always)]
fn words(bytes: &[u8; MAX_NAME_BYTES]) -> [u64; 2] {
    let (words, _) = bytes.as_chunks();
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

impl ObjectShape {
    /// Of no object.
    const NONE: Self = Self {
        names: [ShapeName { text: [0; 2], mask: [0; 2], size: 0 }; MAX_SHAPE_MEMBERS],
        sorted: [0; MAX_SHAPE_MEMBERS],
        len: 0,
        is_sorted: true,
    };

    #[inline(always)]
    pub(super) fn names(&self) -> &[ShapeName] {
        &self.names[..self.len]
    }

    #[inline(always)]
    pub(super) fn sorted(&self) -> &[u8] {
        &self.sorted[..self.len]
    }

    /// The shape of an object, which must be valid JSON. Returns `None` if it is too large, if it has space, escapes or
    /// values that are no scalars, or if names are not ASCII or differ only in case.
    fn of(object: &[u8]) -> Option<Self> {
        let mut shape = Self::NONE;
        let mut texts: [&[u8]; MAX_SHAPE_MEMBERS] = [b""; MAX_SHAPE_MEMBERS];
        let mut pos = 0;
        while object[pos] != b'}' {
            let name_end = string_end(object, pos + 1)?;
            if object[name_end] != b':' {
                return None;
            }
            *shape.names.get_mut(shape.len)? = ShapeName::new(&object[pos..=name_end])?;
            texts[shape.len] = &object[pos + 2..name_end - 1];
            pos = match object[name_end + 1] {
                b'"' => string_end(object, name_end + 1)?,
                b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => {
                    let rest = &object[name_end + 1..];
                    name_end + 1 + rest.iter().position(|byte| matches!(byte, b',' | b'}' | 0..=b' '))?
                }
                _ => return None,
            };
            shape.len += 1;
            if !matches!(object[pos], b',' | b'}') {
                return None;
            }
        }
        let texts = &texts[..shape.len];
        let is_twin = |(i, name): (usize, &&[u8])| texts[..i].iter().any(|other| name.eq_ignore_ascii_case(other));
        if texts.iter().enumerate().any(is_twin) || !texts.iter().all(|name| name.is_ascii()) {
            return None;
        }
        let order = &mut shape.sorted[..shape.len];
        order.iter_mut().enumerate().for_each(|(i, place)| *place = i as u8);
        shape.is_sorted = texts.is_sorted();
        order.sort_unstable_by_key(|i| texts[usize::from(*i)]);
        Some(shape)
    }
}

/// The end of the string without escapes at a position.
fn string_end(object: &[u8], pos: usize) -> Option<usize> {
    let inner = object.get(pos..)?.strip_prefix(b"\"")?;
    let end = inner.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    (inner[end] == b'"').then_some(pos + end + 2)
}

/// The shape of the last object of each depth.
pub(super) struct ObjectShapes {
    shapes: [ObjectShape; SHAPE_DEPTHS],
    learned: usize,
}

impl ObjectShapes {
    pub(super) const fn new() -> Self {
        Self { shapes: [ObjectShape::NONE; SHAPE_DEPTHS], learned: 0 }
    }

    /// Starts with another document.
    pub(super) fn start_document(&mut self) {
        self.learned = 0;
    }

    #[inline(always)]
    pub(super) fn get(&self, depth: usize) -> &ObjectShape {
        &self.shapes[depth % SHAPE_DEPTHS]
    }

    /// Expects the next object of this depth to be like this one.
    #[inline]
    pub(super) fn learn(&mut self, depth: usize, body: &[u8], object: JsonSpan) {
        if self.learned < MAX_LEARNED {
            self.replace(depth, &body[object.start as usize..object.end as usize]);
        }
    }

    #[cold]
    #[inline(never)]
    fn replace(&mut self, depth: usize, object: &[u8]) {
        self.learned += 1;
        if let Some(shape) = ObjectShape::of(object) {
            self.shapes[depth % SHAPE_DEPTHS] = shape;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_has_the_names_of_its_object_and_their_order() {
        let shape = ObjectShape::of(br#"{"sku":"a,}","price":-1.5e3,"gift":false}"#).expect("a shape");
        assert_eq!((shape.names().len(), shape.sorted(), shape.is_sorted), (3, &[2, 1, 0][..], false));
        let body = br#"x{"sku":1,"price":2,"#;
        assert_eq!(shape.names()[0].end_at(body, 1), Some(8));
        assert_eq!(shape.names()[1].end_at(body, 1), None);
        assert!(ObjectShape::of(br#"{"a":1,"b":null}"#).expect("a shape").is_sorted);
    }

    #[test]
    fn only_plain_objects_of_scalars_have_a_shape() {
        for object in [
            r#"{ "a":1}"#,
            r#"{"a" :1}"#,
            r#"{"a": 1}"#,
            r#"{"a":1 }"#,
            r#"{"a":1, "b":2}"#,
            r#"{"a":[1]}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a\u0062":1}"#,
            r#"{"a":"\n"}"#,
            r#"{"a":1,"A":2}"#,
            r#"{"é":1}"#,
            r#"{"thirteen_byte":1}"#,
            r#"{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1,"k":1,"l":1,"m":1,"n":1,"o":1,"p":1,"q":1}"#,
        ] {
            assert!(ObjectShape::of(object.as_bytes()).is_none(), "{object}");
        }
    }
}
