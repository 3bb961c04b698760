"""The sentences of the demo grammar: openings, plots by beats, endings. No logic.

See `grammar` for the notation. Unsuffixed slots are the hero, slots ending in 2 are the friend;
``{at}`` is a preposition with "the" ("by the") and ``{at_a}`` a whole phrase ("by a misty lake").
"""

from __future__ import annotations

from typing import Final

Beat = tuple[str, ...]

OPENINGS: Final[Beat] = (
    "once upon a time there was a {size} {kind} [named|called] {name}, who lived {at_a}.",
    "once upon a time, a {size} {kind} named {name} lived {at_a}.",
    "once upon a time, {at_a}, there lived a {trait} {kind} [named|called] {name}.",
    "once there was a {size} {kind} whose name was {name}. {He} lived {at_a}.",
    "long ago, a {trait} {kind} [named|called] {name} lived {at_a}.",
    "a long time ago, {at_a}, there was a {size} {kind} [named|called] {name}.",
    "{at_a} lived a {size} {kind}, and {his} name was {name}.",
    "this is the story of {name}, a {trait} {kind} who lived {at_a}.",
    "in a {size} house {at_a} lived {name} the {kind}.",
    "[one morning|one evening|one day|early one morning], a {size} {kind} named {name} was walking "
    "{at_a}.",
    "there was once a {trait} {kind} called {name}, who had a small home {at_a}.",
    "everyone {at} {place} knew {name}, the {trait} {kind}.",
)

COLOUR: Final[Beat] = (
    "{He} was {trait} and {trait2}, and {he} loved {food} more than anything.",
    "{He} was very {trait}, but sometimes {he} was a bit too {trait2}.",
    "every morning {he} [opened the window|swept the floor|looked at the sky] and [said hello to "
    "the birds|sang a little song|made a cup of tea].",
    "{He} liked to [walk in the rain|count the stars|listen to the wind|watch the clouds go by].",
    "{at} {place}, [the days were long and the nights were full of stars|the air smelled of "
    "rain and wood|nothing ever happened in a hurry|everyone knew everyone].",
    "people said that {he} was the most {trait} {kind} {at} {place}.",
    "{He} lived all alone, with [a small stove|a shelf full of cups|a round window] and [a big "
    "map|an old clock|a soft bed].",
    "{He} had a {color} [coat|hat|door|blanket|chair] that {he} was very proud of.",
    "the [sun was warm|wind was soft|snow was deep|leaves were turning gold], and the whole "
    "{place} [seemed to be asleep|was quiet|was shining].",
    "most of the time {he} was [happy|alone|busy], and {he} never thought that anything would "
    "change.",
    "{He} was not [rich|strong|famous], but {he} had [a good heart|many good ideas|a warm smile].",
)

LOST: Final[tuple[Beat, ...]] = (
    (
        "[one day|one morning], {he} lost {his} {look} {thing}.",
        "[one evening|one rainy day], {his} {look} {thing} was gone.",
        "but one day {name} woke up and could not find {his} {look} {thing} anywhere.",
    ),
    (
        "it had been a gift from {his} [mother|father|grandmother|uncle], and {he} felt [very sad|"
        "as if a part of {him} was missing].",
        '"oh no!" said {name}. "[where can it be|who could have taken it|what will I do now]?"',
        "{He} had owned that {thing} since {he} was very small.",
    ),
    (
        "{He} looked under the bed, behind the door, and [inside every pot|in the old chest|on top "
        "of the shelf], but it was not there.",
        "{He} searched the whole {place}, [step by step|stone by stone|from one end to the other], "
        "and found only [an old shoe|dry leaves|a lost glove].",
        "all day long {he} looked and looked, until {his} feet were sore.",
    ),
    (
        'then {he} met {name2} the {kind2}. "[why do you look so sad|what is wrong|what are you '
        'looking for]?" asked {name2}.',
        "on the way home {he} met a {size2} {kind2} named {name2}, who [stopped and listened|asked "
        "{him} what was wrong].",
        '"let us look together," said {name2}, a {size2} {kind2} who had heard {him} [cry|sigh].',
    ),
    (
        '"I have lost my {thing}," said {name}. "then [we will find it|let us think]," said '
        '{name2}. "where did you see it last?"',
        '{name} told {him2} everything, and {name2} [nodded slowly|thought for a while]. "when I '
        'lose a thing, I walk the same way back," {he2} said.',
        '"two pairs of eyes are better than one," said {name2}, and they [set off|began at once].',
    ),
    (
        "so they walked back along the path, and there, [under a bush|beside a stone|between two "
        "roots|in the tall grass], was the {thing}.",
        "they looked up instead of down, and saw the {thing} hanging [from a branch|on a fence|in "
        "a bird's nest].",
        "at last {name2} [laughed|pointed]. the {look} {thing} was [in {name}'s own bag|on "
        "{name}'s own back step] the whole time!",
    ),
    (
        '"thank you, {name2}!" said {name}, and [hugged {him2}|jumped for joy|held the {thing} '
        "tight].",
        "{name} was so glad that {he} [danced all the way home|shared {his} {food} with {name2}].",
    ),
)

QUEST: Final[tuple[Beat, ...]] = (
    (
        "more than anything, {name} wanted a {thing} of {his} own.",
        "{name} had one wish: a {look} {thing}.",
        "one day, {he} saw a {look} {thing} in a shop window and could not stop thinking about it.",
    ),
    (
        "but {he} had no money, only [three buttons and a bit of string|a bag of nuts|an apple].",
        "but a {thing} like that cost more than {he} could pay.",
        '"I will [work|save|wait] until I can have one," {he} told {self}.',
    ),
    (
        "so {he} went to {name2} the {kind2} and asked for work.",
        "{He} knocked on the door of {name2}, a {size2} {kind2} who [always had too much to do|"
        "needed help].",
    ),
    (
        '"you may [carry water|chop wood|sweep the yard] for me," said {name2}, "and then we will '
        'see."',
        '"help me for [three|five|seven] days," said {name2}, "and you will not be sorry."',
    ),
    (
        "{name} worked [from morning to night|in sun and rain], and {he} never [complained|stopped "
        "smiling].",
        "the work was hard. {His} arms were tired, but {he} [sang while {he} worked|did not give "
        "up].",
        "on the first day it rained, on the second day it rained more, and on the third day the "
        "sun came out.",
    ),
    (
        "when the work was done, {name2} opened a [wooden box|dusty cupboard]. inside was a {look} "
        "{thing}.",
        'at the end {name2} smiled and put a {look} {thing} into {his} hands. "you have earned '
        'it," {he2} said.',
    ),
    (
        "{name} could hardly speak. it was [just|even better than] what {he} had dreamed of.",
        "{He} carried the {thing} home [under the stars|as if it were made of glass] and put it "
        "[by {his} bed|on the table].",
    ),
)

REPAIR: Final[tuple[Beat, ...]] = (
    (
        "one day, the old {thing} that {he} loved fell down and broke.",
        "{He} had a {look} {thing}, but one day it [cracked|broke in two|stopped working].",
    ),
    (
        "{name} tried to mend it with [glue|string|a nail], but it broke again.",
        "{He} tried [once, twice, three times|all afternoon] to put it together, but the pieces "
        "would not stay.",
    ),
    (
        '"it is no use," {he} said. "[I will never fix it|it is gone for good]."',
        "{He} [sat down on the floor|put {his} head in {his} hands] and wanted to cry.",
    ),
    (
        'just then, {name2} the {kind2} came by. "let me see," {he2} said.',
        "{His} neighbor {name2}, a {size2} {kind2}, looked in at the window and saw the pieces.",
    ),
    (
        '"you are in too much of a hurry," said {name2}. "first we clean the pieces, then we wait, '
        'and then we try."',
        '"you hold it, and I will tie it," said {name2}. "some work needs [four hands|two '
        'friends]."',
    ),
    (
        "they worked side by side until [the sun went down|the candle was short].",
        "slowly, very slowly, the {thing} became whole again.",
    ),
    (
        "it was not as [smooth|pretty] as before, but {name} liked it even more. now it had a "
        "story.",
        "you could still see the crack, and they painted it {color}, so that it looked like "
        "[a river|a small flash of light].",
    ),
)

GIFT: Final[tuple[Beat, ...]] = (
    (
        "it was almost the birthday of {name2}, a {size2} {kind2} and {his} best friend.",
        "one day, {he} heard that {name2} the {kind2} was ill and had to stay in bed.",
    ),
    (
        '"I must find a good gift," thought {name}.',
        "{name} wanted to bring {him2} something special, but {he} did not know what.",
    ),
    (
        "{He} thought of {food}, but {name2} had plenty of that.",
        "{He} looked in every shop, but everything was too [big|dull|expensive].",
    ),
    (
        "then {his} eyes fell on {his} own {look} {thing}, the thing {he} loved best.",
        "at home {he} saw {his} {look} {thing} on the shelf, and {he} [had an idea|grew quiet].",
    ),
    (
        "it was hard to give it away. {He} [held it|looked at it] for a long time.",
        '"if I love it, then {name2} may love it too," {he} said.',
    ),
    (
        'when {name2} opened the parcel, {his2} eyes shone. "your own {thing}!" {he2} said. '
        '"I will [keep it safe|never forget this]."',
        "{name2} [laughed with joy|had tears in {his2} eyes] when {he2} saw the {thing}.",
    ),
    (
        '"come every day, and we will use it together," said {name2}.',
        "then {name2} cut the cake, and the two friends ate {food2} until they were full.",
    ),
)

FOUND: Final[tuple[Beat, ...]] = (
    (
        "one day, {he} found a {look} {thing} lying [on the path|in the grass|under a tree].",
        "while {he} was [walking home|picking berries], {he} [stepped on|saw] something hard. it "
        "was a {look} {thing}!",
    ),
    (
        '"[how lovely|what luck]!" said {name}. "I will keep it for ever."',
        "nobody was there. {name} put the {thing} in {his} bag and went on.",
    ),
    (
        "but that night {he} could not sleep. who had lost it? [was someone sad|was someone "
        "looking for it in the dark]?",
        "but the next day {he} heard that {name2} the {kind2} had lost a {thing} and was very sad.",
    ),
    (
        "part of {him} wanted to keep it and say nothing.",
        "{He} looked at the {thing} and sighed. it was so [pretty|fine|useful].",
    ),
    (
        'in the morning, {name} went from door to door and asked, "Is this yours?"',
        "then {he} [took a deep breath|stood up] and carried the {thing} to the [square|well].",
    ),
    (
        'at last {name2} the {kind2} cried, "that is mine! my [father|grandmother] made it for '
        'me."',
        '{name2}, a {size2} {kind2}, came running. "you found it!" {he2} called.',
    ),
    (
        '"you were honest," said {name2}, "so I want to give you something." and {he2} gave {him} '
        "[a basket of {food}|a {color} scarf].",
        "from that day, {name2} let {him} play with the {thing} as often as {he} liked.",
    ),
)

STORM: Final[tuple[Beat, ...]] = (
    (
        "one night, a great storm came over the {place}.",
        "one autumn day, the sky turned dark and the wind began to howl.",
    ),
    (
        "the rain beat on the roof, and the trees bent low.",
        "thunder rolled, and lightning made the night as bright as day.",
    ),
    (
        'then {name} heard a [voice|cry] outside. "help! help!"',
        "through the noise {he} heard someone calling for help.",
    ),
    (
        "it was {name2}, a {size2} {kind2}, who was [stuck in the mud|holding on to a branch|lost "
        "in the dark].",
        "{He} looked out and saw {name2} the {kind2} [standing on a rock with water all around|"
        "under a fallen tree].",
    ),
    (
        "{name} was afraid, but {he} took a [rope|lamp] and went out into the storm.",
        '"I am scared," thought {name}, "but {name2} must be more scared than I am." and out {he} '
        "went.",
    ),
    (
        "{He} [pulled with all {his} strength|held out {his} hand], and step by step they came "
        "back to the house.",
        '"hold on to me!" {he} called. together they fought their way to the door.',
    ),
    (
        "inside, they sat by the fire and drank [hot milk|cocoa|tea] until the storm was over.",
        '"you saved me," said {name2}. "[anyone would have done the same|you would do it for me]," '
        "said {name}.",
    ),
)

LEARN: Final[tuple[Beat, ...]] = (
    (
        "there was one thing that {he} could not do: {he} could not {skill}.",
        "{name} wanted to learn to {skill}, but {he} thought it was too hard.",
    ),
    (
        "the others [laughed|smiled] when they saw {him} try.",
        "the first time {he} tried, everything went wrong, and {he} [fell over|turned red].",
    ),
    (
        '"I will never learn," {he} said and [went home|hid behind a tree].',
        "{He} wanted to give up and do something easy.",
    ),
    (
        'but {name2}, a {size2} {kind2}, had seen it all. "shall I tell you a secret?" {he2} '
        "asked.",
        "then {name2} the {kind2} sat down next to {him}.",
    ),
    (
        '"I was much worse than you," said {name2}. "I tried a little every day, that is all."',
        '"nobody can {skill} on the first day," said {name2}. "come, we will try together."',
    ),
    (
        "so {name} tried again the next day, and the next, and the day after that.",
        "they met every [morning|evening] {at} {place}, and each time it went a little better.",
    ),
    (
        "and one day, without thinking about it, {name} could {skill}!",
        "when [spring|summer|winter] came, {name} could {skill} as well as anyone.",
    ),
)

NOISE: Final[tuple[Beat, ...]] = (
    (
        "one night, {he} woke up because of {noise}.",
        "late one night, {he} heard {noise}.",
    ),
    (
        '"who is there?" whispered {name}. nobody answered.',
        "{He} pulled the blanket over {his} head, but the sound did not stop.",
    ),
    (
        '"[maybe it is a ghost|maybe it is a monster|maybe it is a thief]," {he} thought, and '
        "{his} heart beat fast.",
        "{His} knees shook, but {he} was also [curious|a little angry].",
    ),
    (
        '{He} ran to {name2} the {kind2}, who lived next door. "please come with me," {he} said.',
        "{He} woke {his} friend {name2}, a {size2} {kind2}, and told {him2} about the sound.",
    ),
    (
        "they lit a candle and walked on the tips of their toes.",
        '"let us go and look," said {name2}. "most scary things are small in the light."',
    ),
    (
        "and what did they find? it was only {cause}!",
        "closer and closer they came, and then they saw it: {cause}.",
    ),
    (
        "they laughed so hard that they had to sit down.",
        "soon the trouble was mended, and the night was quiet again.",
    ),
)

GARDEN: Final[tuple[Beat, ...]] = (
    (
        "one spring day, {he} planted a [tiny|small brown] seed behind the house.",
        'one day, {name2} the {kind2} gave {him} a seed. "take good care of it," {he2} said.',
    ),
    (
        "{He} gave it water every day and [talked to it|sang to it].",
        "every morning {he} ran outside to look, but there was nothing but earth.",
    ),
    (
        "a week went by, and another week, and nothing happened.",
        '"why does it not grow?" {he} asked. "[I have waited so long|maybe it is asleep]."',
    ),
    (
        '"some things take time," said {name2}, {his} friend the {kind2}.',
        '{name2} the {kind2} looked at the pot and said, "Be patient. the best part is under the '
        'ground."',
    ),
    (
        "then a cold night came, and {name} [covered the earth with straw|put {his} own scarf over "
        "the earth] to keep it warm.",
        "so {name} waited, and while {he} waited {he} [painted the fence|learned to {skill}].",
    ),
    (
        "and one morning a little green leaf was [looking at the sun|there]!",
        "at last, after a night of soft rain, a green tip came out of the earth.",
    ),
    (
        "by the end of summer it was a {plant}, the finest one {at} {place}.",
        "it grew and grew until it was a tall {plant}, and birds came to sit beside it.",
    ),
)

STRANGER: Final[tuple[Beat, ...]] = (
    (
        "one day, somebody new came to the {place}. it was {name2}, a {size2} {kind2}.",
        "one winter evening, a {size2} {kind2} named {name2} knocked on {his} door.",
    ),
    (
        "nobody [talked|said hello] to {name2}, because {he2} looked [strange|different|tired and "
        "dirty].",
        "{name2} sat all alone and [looked at the ground|ate a piece of dry bread].",
    ),
    (
        "{name} was shy and did not know what to say.",
        '"I was new once too," thought {name}.',
    ),
    (
        'then {he} took some {food} and [walked over|sat down beside {him2}]. "would you like to '
        'share this with me?" {he} asked.',
        '"[come in|sit here] and have some {food}," said {name}.',
    ),
    (
        '{name2} looked up and smiled. "thank you. nobody has been so kind to me {at} {place}."',
        "{name2} ate slowly, and then {he2} began to talk about [the sea|far lands|{his2} long "
        "journey].",
    ),
    (
        "it turned out that {name2} could {skill} better than anyone.",
        "they found out that they both loved {food2} and [long walks|old songs|funny stories].",
    ),
    (
        "soon the others came to listen too, and {name2} was not a stranger any more.",
        "after that, the two of them were always seen together.",
    ),
)

RACE: Final[tuple[Beat, ...]] = (
    (
        "every year there was a big race around the {place}, and this year {name} wanted to win.",
        'one day, {name2} the {kind2} said, "I am faster than you. let us race to the {place} '
        'gate!"',
    ),
    (
        "{name} trained every day. {He} ran up the hill and down again.",
        "{name} was not fast, but {he} did not like to say no.",
    ),
    (
        "on the day of the race, the sun was hot and [everyone|a large crowd] came to watch.",
        '"ready, steady, go!" called the old [baker|teacher|owl], and they ran.',
    ),
    (
        "{name2} the {kind2} was far in front, but then {he2} [slipped on a stone|hurt {his2} "
        "foot] and fell.",
        "halfway, {name} saw {name2} the {kind2} sitting by the road and holding {his2} leg.",
    ),
    (
        "now {name} could win! but {he} looked back and stopped.",
        '"go on without me," said {name2}. but {name} shook {his} head.',
    ),
    (
        '"put your arm around me," {he} said, and they walked to the end together.',
        "{He} helped {name2} up, and side by side they [crossed the line|came in last].",
    ),
    (
        "they were the last ones, and yet everyone cheered louder than ever before.",
        '"you did not win the race," said the judge, "but you won a friend."',
    ),
)

BAKING: Final[tuple[Beat, ...]] = (
    (
        "every autumn there was a baking contest {at} {place}, and {name} dreamed of the first "
        "prize.",
        "one day, {name} decided to bake a cake for the whole {place}.",
        "it was the day of the great feast, and {name} had promised to bring a cake.",
    ),
    (
        "{He} mixed flour, eggs and butter, and sang so loudly that the spoons danced.",
        "{He} worked all night, with flour on {his} nose and honey on {his} sleeves.",
    ),
    (
        "but {he} was so excited that {he} took salt instead of sugar.",
        "but when {he} turned away for a moment, {he} took the wrong jar. it was salt!",
    ),
    (
        '"oh dear," said {name} when {he} tasted it. "[it tastes like the sea|nobody can eat '
        'this]."',
        "{He} took one bite, made a terrible face and ran for a glass of water.",
    ),
    (
        "then {name2} the {kind2} came by with a basket of {food}. {He2} tasted the cake and "
        "laughed until {he2} cried.",
        "just then {name2}, a {size2} {kind2}, put {his2} head through the window. "
        '"it smells good," {he2} said. "[may I help|what is wrong]?"',
    ),
    (
        '"do not throw it away," said {name2}. "with cheese on top, it is a fine salty pie."',
        "together they made another one, and this time {name2} read every label aloud.",
    ),
    (
        "the judges ate three plates each and asked for more.",
        "in the end everyone wanted to know the secret, but the two cooks only smiled.",
    ),
)

LETTER: Final[tuple[Beat, ...]] = (
    (
        "one morning, a letter lay in front of {his} door.",
        "one day, the postman brought {him} a {color} letter.",
    ),
    (
        "but the name on it was not {name}. it said {name2}.",
        "{name} was so glad that {he} nearly opened it, but then {he} saw that it was for "
        "somebody called {name2}.",
    ),
    (
        "{He} did not know anyone with that name.",
        '"who can that be?" {he} wondered.',
    ),
    (
        "so {he} put on {his} boots and asked [at the mill|at the market|in every street], but "
        "everyone shook their heads.",
        "{He} walked over the hill and through the rain, and {he} kept the letter dry under {his} "
        "coat.",
    ),
    (
        "when it was almost dark, {he} saw a light in a small window.",
        "at the very end of the road stood a lonely little house.",
    ),
    (
        'a {size2} {kind2} opened the door. "I am {name2}," {he2} said. "nobody has written to me '
        'for years!"',
        "{name2} was a {size2} {kind2}, and {his2} hands shook when {he2} read the letter.",
    ),
    (
        'it was from {his2} sister, and it said: "I am coming home." {name2} danced around the '
        "table.",
        'inside there were only four words: "I think of you." {name2} read them again and again.',
    ),
    (
        '"stay and eat with me," said {name2}, and {he2} put {food} on the table.',
        "from then on, {name} wrote {him2} a letter every week.",
    ),
)

MOON: Final[tuple[Beat, ...]] = (
    (
        "every night {name} looked up and wished that {he} could touch the moon.",
        "{name} had a great dream: {he} wanted to visit the moon.",
    ),
    (
        "first {he} climbed the tallest tree, but the moon was still far away.",
        "{He} stood on a chair, on a table, and then on a chair on a table.",
    ),
    (
        "then {he} built a ladder out of [branches|old boxes], but it fell over with a crash.",
        "then {he} jumped as high as {he} could and landed in a bush.",
    ),
    (
        '"what are you doing up there?" asked {name2}, a {size2} {kind2} who could not sleep.',
        "{name2} the {kind2} had watched it all and tried not to laugh.",
    ),
    (
        '"I want to hold the moon, just once," said {name}.',
        '"the moon is too far away," said {name}, and {he} was close to tears.',
    ),
    (
        '{name2} thought for a moment. "come with me to the water," {he2} said.',
        "{name2} said nothing, but {he2} brought a bowl of water and put it on the grass.",
    ),
    (
        "and there lay the moon, round and bright, right in front of them. {name} put {his} hand "
        "into the water and touched it.",
        "{name} bent down and saw the moon in the water, so near that {he} could stroke it.",
    ),
)

WINTER: Final[tuple[Beat, ...]] = (
    (
        "all summer long, {name} [gathered food|cut wood|filled {his} shelves] for the winter.",
        "winter came early that year, and the snow lay as high as the windows.",
    ),
    (
        '{name2} the {kind2} only [played music|danced|slept in the sun]. "winter is far away," '
        "{he2} said.",
        "not far away lived {name2}, a {size2} {kind2} who never [thought of tomorrow|saved "
        "anything].",
    ),
    (
        "then the first snow fell, and the wind was as cold as a knife.",
        "soon the river was frozen, and there was nothing left to eat outside.",
    ),
    (
        "one night there was a knock at the door. it was {name2}, and {he2} shivered from head to "
        "foot.",
        "{name} found {name2} sitting in the snow, too cold to speak.",
    ),
    (
        '"you should have worked like me," {name} wanted to say. but {he} saw {his2} blue nose and '
        "said nothing.",
        "for a moment {name} was angry, but then {he} opened the door wide.",
    ),
    (
        '"come in," said {name}. "there is {food} enough for two."',
        "{He} gave {him2} a blanket, a chair by the fire and a plate of {food}.",
    ),
    (
        "all winter long {name2} [sang songs|told stories|played music] for {him}, and the dark "
        "evenings were never dull.",
        '"next summer I will help you," said {name2}, and {he2} kept {his2} word.',
    ),
)

TREASURE: Final[tuple[Beat, ...]] = (
    (
        "one day, {he} found an old map in [a bottle|a book|the attic]. a red cross was painted on "
        "it.",
        "one rainy day, an old map fell out of a cupboard and landed at {his} feet.",
    ),
    (
        '"a treasure!" cried {name}, and {he} ran to tell {name2}, {his} friend the {kind2}.',
        "{name} showed it to {name2}, a {size2} {kind2}, and they made a plan at once.",
    ),
    (
        "they packed {food}, a rope and a lamp, and set off before the sun was up.",
        "early in the morning they started, with a shovel and a big bag of {food}.",
    ),
    (
        "they crossed a stream, climbed over rocks and got lost two times.",
        "the path was steep and full of thorns, and {name2} tore {his2} coat.",
    ),
    (
        '"shall we go home?" asked {name2}. "[only a little further|not yet]," said {name}.',
        "{name} grew tired, but {name2} held the map up and pointed to the next hill.",
    ),
    (
        "under a crooked tree they began to dig, and soon they hit something hard. it was a box!",
        "at last they found the place, and behind a stone there was a small iron box.",
    ),
    (
        'in the box there was no gold, only a note: "the best treasure is the friend who came with '
        'you."',
        "it was full of old toys, glass marbles and a {look} {thing}. they shared everything.",
    ),
    (
        "they looked at each other and laughed, and then they ate the rest of the {food}.",
        "on the way home they sang, and the road seemed only half as long.",
    ),
)

PLOTS: Final[dict[str, tuple[Beat, ...]]] = {
    "lost": LOST,
    "quest": QUEST,
    "repair": REPAIR,
    "gift": GIFT,
    "found": FOUND,
    "storm": STORM,
    "learn": LEARN,
    "noise": NOISE,
    "garden": GARDEN,
    "stranger": STRANGER,
    "race": RACE,
    "baking": BAKING,
    "letter": LETTER,
    "moon": MOON,
    "winter": WINTER,
    "treasure": TREASURE,
}
ABOUT_THINGS: Final = ("lost", "quest", "repair", "gift", "found")
ABOUT_VIRTUES: Final[dict[str, tuple[str, ...]]] = {
    "friendship": ("lost", "stranger", "race", "gift", "treasure"),
    "courage": ("storm", "noise"),
    "kindness": ("stranger", "race", "gift", "letter", "winter"),
    "patience": ("garden", "repair", "learn"),
    "honesty": ("found", "letter"),
    "sharing": ("gift", "stranger", "winter"),
    "hope": ("garden", "learn", "moon"),
    "teamwork": ("repair", "lost", "storm", "baking", "treasure"),
}
LESSONS_OF: Final[dict[str, tuple[str, ...]]] = {
    plot: tuple(virtue for virtue, tales in ABOUT_VIRTUES.items() if plot in tales)
    for plot in PLOTS
    if plot != "quest"
} | {"quest": ("patience",)}
# What the story was about, for follow-up questions; filled from the story's own facts.
SUMMARIES: Final[dict[str, str]] = {
    "lost": "{name} lost {his} {thing}, and {name2} helped {him} to find it.",
    "quest": "{name} wanted a {thing} and worked for {name2} to get it.",
    "repair": "{name} broke {his} {thing}, and {name2} helped {him} to mend it.",
    "gift": "{name} gave {his} own {thing} to {his} friend {name2}.",
    "found": "{name} found a {thing} and gave it back to {name2}.",
    "storm": "{name} saved {name2} in a great storm.",
    "learn": "{name} learned something hard with the help of {name2}.",
    "noise": "{name} and {name2} found out where a strange noise came from.",
    "garden": "{name} planted a seed and waited until it grew.",
    "stranger": "{name} was kind to {name2}, and they became friends.",
    "race": "{name} stopped in a race to help {name2}.",
    "baking": "{name} took salt instead of sugar, and {name2} saved the day.",
    "letter": "{name} carried a lost letter to {name2}.",
    "moon": "{name} wanted to touch the moon, and {name2} showed {him} how.",
    "winter": "{name} took {name2} in when the winter was cold.",
    "treasure": "{name} and {name2} went to look for a treasure.",
}

FEELINGS: Final[Beat] = (
    "{name} was [very happy|proud and happy|tired but happy].",
    "that night, {name} [slept better than ever|fell asleep with a smile].",
    "{name} felt warm inside, like after a bowl of hot soup.",
    "{name} smiled, and {name2} smiled back.",
    "{name} had never been so happy in all {his} life.",
    "and {name} knew that {he} would never forget that day.",
    "the two friends sat [outside|by the window] and watched the [stars|sunset|moon].",
    "they celebrated with {food2}, and there was enough for everyone.",
)

CLOSINGS: Final[Beat] = (
    "and they lived happily ever after.",
    "from that day on, {name} and {name2} were [the best of friends|good friends].",
    "and if you walk {at} {place} today, you may still [hear them laugh|see them together].",
    "and so everything was well {at} {place}.",
    "and that is how the {kind} and the {kind2} became friends.",
    "people {at} {place} still tell this story today.",
    "after that, {name} was never [lonely|afraid|sad] for long.",
    "the end.",
    "and the moon shone down on the {place}, and all was quiet.",
    "and whenever the wind blew, {name} thought of that day and smiled.",
)

LESSONS: Final[dict[str, Beat]] = {
    "friendship": (
        "a good friend is worth more than gold.",
        "{name} had learned that friendship makes every day brighter.",
    ),
    "courage": (
        "{name} had learned that courage means to be afraid and still go on.",
        "being brave does not mean that you are never scared.",
    ),
    "kindness": (
        "{name} had learned that a little kindness goes a long way.",
        "kindness costs nothing, and it comes back to you.",
    ),
    "patience": (
        "{name} had learned that good things take time.",
        "with patience, even a small step leads far.",
    ),
    "honesty": (
        "{name} had learned that it feels good to be honest.",
        "the truth may be hard, but it lets you sleep well.",
    ),
    "sharing": (
        "{name} had learned that joy grows when you share it.",
        "what you share, you have twice.",
    ),
    "hope": (
        "{name} had learned never to lose hope.",
        "after every long night comes a morning.",
    ),
    "teamwork": (
        "{name} had learned that together we can do more than alone.",
        "many hands make light work.",
    ),
}
