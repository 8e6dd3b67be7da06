"""What research.benchmarks.folder writes beside the documentation of Debian's packages: office
files, a PDF, mail, old encodings and notes in five languages; and the questions about all of it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from pathlib import Path

HANDBOOK = (
    "Working hours are from nine to five; those who start later stay later. The office in Leeds is "
    "open from seven in the morning, and the alarm is set at nine in the evening.",
    "Every employee has 28 days of paid holiday a year. Up to five days that were not taken can be "
    "carried over until the end of March. Ask your manager two weeks ahead.",
    "Who falls ill tells the team before ten o'clock, and brings a doctor's note from the fourth "
    "day on.",
)
ALLOWANCES = (
    ("Journey to", "Meals, a day", "Hotel, at most"),
    ("Great Britain", "31 pounds", "120 pounds"),
    ("Switzerland", "74 francs", "230 francs"),
    ("Japan", "8,200 yen", "21,000 yen"),
)
STOCK = (
    ("Part", "Name", "Shelf", "In stock"),
    ("NW-1007", "stainless hinge, 40 mm", "C4", 212),
    ("NW-1070", "brass hinge, 40 mm", "C5", 18),
    ("NW-2203", "rubber foot, black", "A1", 960),
    ("NW-3310", "gas spring, 150 N", "F2", 7),
)
SLIDES = {
    "Results of the year 2024": "Revenue grew by 12 % to 4.3 million; margin 31 %, from 28 %",
    "Plans for 2025": "A second warehouse in Hull, from May; two apprentices in the workshop",
}
REPORT = """Inspection of the boiler house

The safety valve of boiler two opens at 5.8 bar, where 6.0
bar is prescribed. It was adjusted on the same day. The insu-
lation of the return pipe is damaged over two metres and has
to be replaced before the winter. The flue gas has 9.1 % of
carbon dioxide and a temperature of 164 degrees, which is
within the limits. The next inspection is due in October."""
MAILS = {
    "lift": (
        "Broken lift in building B",
        "Hello all,\n\nthe lift in building B is out of order until Thursday. The fitter waits for "
        "a new door sensor. Please use the stairs or the goods lift in building C.\n\nMarta\n",
    ),
    "guests": (
        "Network for guests",
        "Hi,\n\nvisitors use the network Heron. Its password changes each Monday and stands on the "
        "board behind the reception.\n\nJon\n",
    ),
}
TEXTS: Mapping[str, tuple[str, str]] = {  # path: encoding, text
    "office/menu.txt": (
        "latin-1",
        "Café René, menu of the week\r\n\r\nMonday: crème of leek, then pike-perch à la meunière."
        "\r\nTuesday: onion soup gratinée, then stuffed peppers.\r\n",
    ),
    "office/server room.log": (
        "utf-16",
        "2024-11-02 03:10 The air conditioning failed, temperature rose to 41 degrees.\r\n"
        "2024-11-02 03:45 Rack 7 was shut down by hand.\r\n"
        "2024-12-14 10:00 Both batteries of the emergency supply were replaced.\r\n",
    ),
    "notes/garten.md": (
        "utf-8",
        "# Garten\n\n- Die Tomaten werden Mitte Mai ausgepflanzt, nach den Eisheiligen.\n"
        "- Der Kompost wird alle acht Wochen umgesetzt.\n",
    ),
    "notes/auto.txt": (
        "cp1252",
        "Die Winterreifen liegen im Keller der Werkstatt Müller.\r\n\r\n"
        "Der Zahnriemen ist bei 120.000 Kilometern fällig.\r\n",
    ),
    "notes/recette.md": (
        "utf-8",
        "# Tarte aux poireaux\n\nFaire revenir les poireaux vingt minutes dans le beurre, puis "
        "ajouter trois œufs et la crème. Cuire quarante minutes à 180 degrés.\n",
    ),
    "notes/voyage.txt": (
        "utf-8",
        "Le ferry pour la Corse part de Toulon à vingt et une heures. La cabine est réservée au "
        "nom de Lefèvre.\n",
    ),
    "notes/дача.txt": (
        "cp1251",
        "Ключ от дачи лежит под третьим цветочным горшком слева от крыльца.\r\n\r\n"
        "Воду в доме перекрывают на зиму, кран находится в подвале за котлом.\r\n",
    ),
    "notes/врач.md": (
        "utf-8",
        "# Врач\n\nПриём у зубного врача перенесён на четверг, в половине десятого утра.\n",
    ),
    "notes/会議.txt": (
        "shift_jis",
        "次の会議は来週の水曜日に三階の大会議室で行います。\r\n"
        "資料は前日までに田中さんへ送ってください。\r\n",
    ),
    "notes/旅行.md": (
        "utf-8",
        "# 京都旅行\n\n- 新幹線は朝八時に東京駅を出発します。\n- 旅館は夕食付きです。\n",
    ),
    "notes/房租.txt": (
        "gb18030",
        "房租每月五号之前转账给房东，押金是两个月的租金。\r\n水电费由房客自己支付。\r\n",
    ),
    "notes/菜谱.md": (
        "utf-8",
        "# 西红柿炒鸡蛋\n\n1. 先把鸡蛋打散，加一点盐。\n2. 西红柿切块，炒出汁以后再放糖。\n",
    ),
}

QUESTIONS: Mapping[str, str] = {  # question: pattern of the paths that answer it, | between
    "how do I see which npm packages of my project are out of date": "*npm-outdated*",
    "why did npm install this package, who depends on it": "*npm-explain*",
    "take a version that I published back from the npm registry": "*npm-unpublish*",
    "remove npm packages that my package.json does not list any more": "*npm-prune*",
    "under which name am I logged in to the npm registry": "*npm-whoami*",
    "turn on two-factor authentication for my npm account": "*npm-profile*",
    "have npm install exactly what the lock file says, on a build server": "*npm-ci.*",
    "mark an old version of my npm package so that people are warned": "*npm-deprecate*",
    "whom can I give money to for the npm packages that I use": "*npm-fund*",
    "who wrote the first version of sudo, and where": "*sudo/HISTORY*",
    "how can I stop sudo from asking for a password": "*sudo/TROUBLESHOOTING*|*sudoers*",
    "whom do I tell about a security hole in sudo": "*sudo/SECURITY*",
    "start the rsync daemon at boot without systemd": "*rsync/README.Debian*",
    "who runs the daily scripts if anacron is installed": "*cron/README.anacron*",
    "how is Debian pronounced": "*FAQ*basic-defs*|*debian-faq.en*",
    "which film gave Debian releases their names": "*FAQ*ftparchives*|*debian-faq.en*",
    "keep a package at its version when everything else is upgraded": (
        "*FAQ*pkg-basics*|*FAQ*uptodate*|*FAQ*pkgtools*|*debian-faq.en*|*apt-doc/guide*"
    ),
    "how do I become a Debian developer": "*FAQ*contributing*|*debian-faq.en*",
    "find out which package a file on my disk belongs to": "*FAQ*pkgtools*|*debian-faq.en*",
    "build a deb without being root or using fakeroot": "*rootless-builds*",
    "use apt on a machine that has no network, with a disk that is carried": "*offline*",
    "run something once after many other packages were unpacked": "*spec/triggers*",
    "use PHP with nginx through a unix socket": "*nginx/php*|*nginx/examples*",
    "read a control file field by field in Python": "*tagfile*|*apt_pkg*|*deb822*",
    "how many days of holiday do we get": "office/handbook.docx*",
    "what may a hotel in Switzerland cost": "office/handbook.docx*",
    "on which shelf is NW-1007": "office/stock.xlsx*",
    "how many gas springs do we have left": "office/stock.xlsx*",
    "where will the second warehouse be": "office/results.pptx*",
    "at which pressure did the safety valve open": "office/inspection.pdf*",
    "until when is the lift out of order": "office/lift.eml*",
    "where do visitors find the wifi password": "office/mail.mbox*",
    "what is for lunch on Tuesday": "office/menu.txt*",
    "when did the cooling of the server room fail": "office/server room.log*",
    "Wann werden die Tomaten ausgepflanzt?": "notes/garten.md*",
    "Wo liegen meine Winterreifen?": "notes/auto.txt*",
    "à quelle heure part le ferry pour la Corse": "notes/voyage.txt*",
    "где лежит ключ от дачи": "notes/дача.txt*",
    "次の会議はどこで行いますか": "notes/会議.txt*",
    "房租什么时候交": "notes/房租.txt*",
}
UNANSWERED: Sequence[str] = (
    "how much water does a cactus need in winter",
    "who won the football world cup in 1998",
    "what is the boiling point of mercury",
    "how do I file my income tax in Ireland",
    "train a neural network to recognise handwritten digits",
    "symptoms of vitamin B12 deficiency",
    "restart a pod that is stuck in CrashLoopBackOff",
    "tune autovacuum of a large PostgreSQL table",
    "when was the castle of Edinburgh built",
    "what does the company pay for parental leave",
    "which supplier delivers our packaging",
    "how many people work in the Leeds office",
    "what did the new forklift cost",
    "telephone number of the landlord of the Hull warehouse",
    "how do I knit a heel",
    "rules of the offside trap",
    "Wann fährt der letzte Bus nach Freiburg?",
    "combien coûte l'abonnement à la piscine",
    "как оформить загранпаспорт ребёнку",
    "去上海的火车几点出发",
)


def write_files(folder: Path) -> None:
    """All that is not a Debian package's, below a folder that exists."""
    for name, (encoding, text) in TEXTS.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode(encoding))
    office = folder / "office"
    write_word(office / "handbook.docx")
    write_excel(office / "stock.xlsx")
    write_slides(office / "results.pptx")
    write_pdf(office / "inspection.pdf")
    lift, guests = (message(*mail) for mail in MAILS.values())
    (office / "lift.eml").write_bytes(bytes(lift))
    (office / "mail.mbox").write_bytes(b"From jon Mon Jan  6 09:00:00 2025\n" + bytes(guests))


def write_word(path: Path) -> None:
    """Paragraphs and a table, in the least that Word opens."""
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    package = "http://schemas.openxmlformats.org/package/2006"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"

    def paragraph(text: str) -> str:
        return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"

    rows = ("".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in cells) for cells in ALLOWANCES)
    table = "<w:tbl>" + "".join(f"<w:tr>{cells}</w:tr>" for cells in rows) + "</w:tbl>"
    body = "".join(map(paragraph, HANDBOOK)) + table
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{package}/content-types"><Default Extension="rels" ContentType='
            '"application/vnd.openxmlformats-package.relationships+xml"/><Override PartName='
            f'"/word/document.xml" ContentType="{kind}"/></Types>',
        )
        file.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{package}/relationships"><Relationship Id="a" Target='
            f'"word/document.xml" Type="{office}/officeDocument"/></Relationships>',
        )
        file.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
        )


def write_excel(path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for row in STOCK:
        book.active.append(row)
    book.save(path)


def write_slides(path: Path) -> None:
    import pptx

    deck = pptx.Presentation()
    for title, text in SLIDES.items():
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, text
    deck.save(path)


def write_pdf(path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"pdf.fonttype": 42}):
        page = Figure((8, 11))
        page.text(0.1, 0.5, REPORT)
        page.savefig(path, metadata={"Title": "Boiler house"})


def message(subject: str, text: str) -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["To"] = "office@example.org", "all@example.org"
    mail["Subject"], mail["Date"] = subject, "Mon, 06 Jan 2025 09:00:00 +0000"
    mail.set_content(text)
    return mail
