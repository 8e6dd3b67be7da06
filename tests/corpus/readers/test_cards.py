"""Contacts and calendars: a line per entry."""

import time

import pytest

from revela.corpus.load import read_corpus

CARDS = """BEGIN:VCARD
VERSION:3.0
N:Müller;Anna;;Dr.;
FN:Dr. Anna Müller
item1.EMAIL;TYPE=WORK:anna@example.org
ADR;TYPE=HOME:;;Hauptstr. 5;Ulm;;89073;Germany
NOTE:Met at the fair\\, likes ho
 ney\\nand wax
PHOTO;ENCODING=b;TYPE=JPEG:/9j/4AAQSkZJRgABAQAAAQ
 HBwgJC4nICIsIxwcKDcpLDAxNDQ0Hyc5
END:VCARD
BEGIN:VCARD
VERSION:2.1
FN;CHARSET=UTF-8;ENCODING=QUOTED-PRINTABLE:=D0=98=D0=B2=
=D0=B0=D0=BD
TEL;HOME:+7 495 123
END:VCARD
"""
EVENTS = """BEGIN:VCALENDAR
PRODID:-//x//EN
BEGIN:VTIMEZONE
TZID:Europe/Berlin
END:VTIMEZONE
BEGIN:VEVENT
UID:1@x
DTSTART;TZID=Europe/Berlin:20260504T100000
SUMMARY:Dentist
LOCATION:Main street 4\\, Ulm
ATTENDEE;CN="Bo, the second";ROLE=REQ:mailto:b@x.org
BEGIN:VALARM
DESCRIPTION:Reminder
END:VALARM
END:VEVENT
END:VCALENDAR
"""
LINES = {
    "a.vcf": "Name: Dr. Anna Müller; Email: anna@example.org; Address: Hauptstr. 5, Ulm, 89073, "
    "Germany; Note: Met at the fair, likes honey and wax\nName: Иван; Phone: +7 495 123",
    "a.ics": "Start: 2026-05-04 10:00; Summary: Dentist; Location: Main street 4, Ulm; "
    "Attendee: Bo, the second b@x.org",
}


@pytest.mark.parametrize(("name", "text"), [("a.vcf", CARDS), ("a.ics", EVENTS)])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_entry_is_a_line_of_labels_and_values(tmp_path, name, text, end):
    (tmp_path / name).write_bytes(text.replace("\n", end).encode())
    assert read_corpus([tmp_path])[0][0].text == LINES[name]


@pytest.mark.parametrize("piece", ["BEGIN:VCARD\n", "A;QUOTED-PRINTABLE:=\n", "a;" * 99, '"', "= "])
def test_other_files_are_read_as_they_are_in_no_time(tmp_path, piece):
    text = "##fileformat=VCFv4.2 of a gene\n" + piece * (200_000 // len(piece))
    (tmp_path / "a.vcf").write_text(text)
    begin = time.process_time()
    assert read_corpus([tmp_path])[0][0].text == text
    assert time.process_time() - begin < 2
